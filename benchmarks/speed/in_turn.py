"""Time forward and backward of the eager model and of the generated stage of a one-stage plan, in turn.

``python -m benchmarks.speed.in_turn WORK DEVICE REPEATS`` prints pairs of seconds (eager, stage) as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from autopipe.generate import load_constants, load_stage
from autopipe.workload import Workload
from benchmarks.speed.running import plan_of

WARM_UP = 3


def pairs(work: Path, device: torch.device, repeats: int) -> list[tuple[float, float]]:
    """Return the seconds of both, in turn, after a warm-up.

    Raises: SystemExit if their losses differ on a CPU.
    """
    torch.set_num_threads(1)
    plan = plan_of(work)
    workload = Workload.from_spec(plan.workload)
    item = next(iter(workload.items(plan.batch_size)))
    leaves = {name: leaf.to(device) for name, leaf in workload.leaves(item).items()}
    item = workload.with_leaves(item, leaves)
    eager = workload.build_model().to(device)
    digests = {"graph_digest": plan.graph_digest, "plan_digest": plan.digest}
    stage = load_stage(work / "stages", 0, **digests).adopt(workload.build_model(), load_constants(work / "stages"))
    stage = stage.place(device)
    stage.train()
    inputs = [leaves[name] for name in stage.INPUTS]

    def run_eager() -> torch.Tensor:
        return workload.loss(eager, item)[0]

    def run_stage() -> torch.Tensor:
        loss: torch.Tensor = stage(*inputs)[0]
        return loss

    def timed(model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> tuple[float, float]:
        model.zero_grad(set_to_none=True)
        begin = _now(device)
        loss = forward()
        loss.backward()
        return _now(device) - begin, float(loss)

    times = []
    for index in range(WARM_UP + repeats):
        both = {}
        for kind in ("eager", "stage") if index % 2 else ("stage", "eager"):
            both[kind] = timed(eager, run_eager) if kind == "eager" else timed(stage, run_stage)
        if device.type == "cpu" and both["eager"][1] != both["stage"][1]:
            raise SystemExit(f"the losses differ: {both['eager'][1]} eager, {both['stage'][1]} in the stage")
        times.append((both["eager"][0], both["stage"][0]))
    return times[WARM_UP:]


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    print(json.dumps(pairs(Path(sys.argv[1]), torch.device(sys.argv[2]), int(sys.argv[3]))))

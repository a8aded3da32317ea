"""The peers: ``torch.distributed.pipelining`` on the stages that autopipe generated, and the plain loop.

``python -m benchmarks.speed.worker SPECS``, where SPECS is a JSON list of trainings of one model, run in turn:
``system`` (plain, gpipe, 1f1b or interleaved), ``work`` (a work directory with a plan and its stage files), ``steps``
(null: until it is killed), and ``folder`` for the answer and for ``metrics.jsonl``, a line for each step. Ranks are
processes forked from one that has imported torch and the model, as autopipe's are, with one thread each, over gloo on
the loopback interface.

Each rank runs the same generated stages, initial weights, minibatches, microbatches and optimizer as autopipe's ranks.
A value for a later stage than the next travels through the stages between, because a peer's stage sends to the next
stage only. The gradients of a tied parameter are summed over its ranks after the backward.
"""

from __future__ import annotations

import datetime
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from autopipe.generate import load_constants, load_stage
from autopipe.ir.plan import Plan
from autopipe.stage import Stage
from autopipe.verify.plain import PlainSettings, plain_training
from autopipe.workload import Workload
from benchmarks.speed.meter import FOLDER
from benchmarks.speed.running import plan_of

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LEAF = "leaf_"  # a prefix of names of the batch, which may be those of arguments of a schedule: ``target``
CONNECT = datetime.timedelta(seconds=300)


class Relay(nn.Module):
    """A generated stage as a peer's stage: takes what the stage before returns, and passes on what later ones need."""

    def __init__(self, stage: Stage, plan: Plan) -> None:
        super().__init__()
        self.stage, index = stage, stage.INDEX
        # in the order of the plan, which both ends know
        self.taken = [b.value for b in plan.boundaries if b.producer < index <= b.consumers[-1]]
        self.passed = [b.value for b in plan.boundaries if b.producer <= index < b.consumers[-1]]

    def forward(self, *values: torch.Tensor, **leaves: torch.Tensor) -> Any:
        """Return the loss of the last stage, or the values for later ones. ``values``: of the batch, or received."""
        stage = self.stage
        if stage.INDEX == 0:
            known, inputs = {}, values
        else:
            known = dict(zip(self.taken, values, strict=True))
            inputs = (*(leaves[LEAF + name] for name in stage.INPUTS), *(known[name] for name in stage.RECEIVES))
        results = stage(*inputs)
        known.update(zip((*stage.SENDS, *stage.RETURNS), results, strict=True))
        if stage.RETURNS:
            return known[stage.RETURNS[0]]
        # a received value is passed on as a view, so that it is not both input and output; gloo sends no other tensors
        # than contiguous ones
        return tuple(known[n].view_as(known[n]) if n in self.taken else known[n].contiguous() for n in self.passed)


def minibatches(workload: Workload, batch_size: int, steps: int | None) -> Iterator[Any]:
    """Yield the minibatches of autopipe's training, epoch after epoch; None: without an end."""
    epochs = (workload.items(batch_size, epoch=epoch) for epoch in itertools.count())
    return itertools.islice(itertools.chain.from_iterable(epochs), steps)


def rank_main(rank: int, spec: dict[str, Any]) -> None:
    """Train as one rank, and write when its steps ended, and the losses if it has them."""
    torch.set_num_threads(1)
    plan, work, folder = plan_of(Path(spec["work"])), Path(spec["work"]), Path(spec["folder"])
    store = dist.FileStore(str(folder / "store"), plan.num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.num_ranks, timeout=CONNECT)
    workload = Workload.from_spec(plan.workload)
    model, constants = workload.build_model(), load_constants(work / "stages")
    digests = {"graph_digest": plan.graph_digest, "plan_digest": plan.digest}
    own = [stage.index for stage in plan.stages if rank in stage.ranks]
    stages = [load_stage(work / "stages", index, **digests).adopt(model, constants) for index in own]
    for stage in stages:
        stage.train()
    parts = [PipelineStage(Relay(stage, plan), stage.INDEX, len(plan.stages), torch.device("cpu")) for stage in stages]
    schedule = _schedule(spec["system"], parts, plan.num_microbatches)
    parameters = {name: tensor for stage in stages for name, tensor in stage.named_parameters()}
    optimizer = workload.optimizer(list(parameters.items()))
    ties = _ties(plan, parameters)
    losses: list[float] = []
    ends: list[float] = []
    metrics = _metrics(folder)
    for item in minibatches(workload, plan.batch_size, spec["steps"]):
        leaves = workload.leaves(item)
        named = {LEAF + name: leaves[name] for stage in stages if stage.INDEX for name in stage.INPUTS}
        first = [leaves[name] for name in stages[0].INPUTS] if stages[0].INDEX == 0 else []
        parts_losses: list[torch.Tensor] = []
        is_last = bool(stages[-1].RETURNS)
        target = next(iter(leaves.values())) if is_last else None  # the stage has computed the loss
        schedule.step(*first, target=target, losses=parts_losses, return_outputs=False, **named)
        for parameter, group in ties:
            dist.all_reduce(parameter.grad, group=group)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        ends.append(time.perf_counter())
        if is_last:
            losses.append(float(torch.stack(parts_losses).mean()))
            metrics(ends[-1], losses[-1])
    dist.barrier()
    dist.destroy_process_group()
    _answer(rank, spec, ends, losses)


def _schedule(system: str, parts: list[PipelineStage], num_microbatches: int) -> Any:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output

    if system in SINGLE:
        return SINGLE[system](parts[0], num_microbatches, loss)
    return ScheduleInterleaved1F1B(parts, num_microbatches, loss)  # type: ignore[arg-type]  # a list is invariant


def _ties(plan: Plan, parameters: dict[str, nn.Parameter]) -> list[tuple[nn.Parameter, Any]]:
    """Return the tied parameters of this rank that other ranks have too, each with the group of their ranks."""
    shared = []
    for tie in plan.ties:
        ranks = sorted({plan.stages[index].ranks[0] for index in (tie.owner, *tie.copies)})
        if len(ranks) > 1:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                shared.append((parameters[tie.parameter], group))
    return shared


def in_processes(spec: dict[str, Any], main: Callable[[int, dict[str, Any]], None], count: int) -> dict[str, Any]:
    """Train in forked processes. Raises: SystemExit if one fails."""
    folder = Path(spec["folder"])
    os.environ[FOLDER] = spec["folder"]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=main, args=(rank, spec), name=f"rank {rank}") for rank in range(count)]
    for process in ranks:
        process.start()
    while any(process.exitcode is None for process in ranks) and not any(process.exitcode for process in ranks):
        time.sleep(0.02)
    failed = [index for index, process in enumerate(ranks) if process.exitcode]
    for process in ranks:
        process.kill()
        process.join()
    if failed:
        raise SystemExit(f"rank {failed[0]} of {spec['system']} failed")
    answers = [json.loads((folder / f"answer_{rank}.json").read_text(encoding="utf-8")) for rank in range(count)]
    ends = [max(moments) for moments in zip(*(answer["ends"] for answer in answers), strict=True)]
    return {"ends": ends, "losses": next(answer["losses"] for answer in answers if answer["losses"])}


def plain_main(rank: int, spec: dict[str, Any]) -> None:
    """Train by the plain loop, with the microbatches of the plan."""
    torch.set_num_threads(1)
    plan = plan_of(Path(spec["work"]))
    workload = Workload.from_spec(plan.workload)
    ends: list[float] = []
    metrics = _metrics(Path(spec["folder"]))

    def on_step(step: int, loss: float) -> None:
        ends.append(time.perf_counter())
        metrics(ends[-1], loss)

    run = plain_training(
        workload,
        minibatches(workload, plan.batch_size, spec["steps"]),
        PlainSettings(plan.num_microbatches, seed=plan.workload.seed, draws=False),
        on_step=on_step,
    )
    _answer(rank, spec, ends, run.losses)


def _metrics(folder: Path) -> Callable[[float, float], None]:
    """Return a function that writes the end and the loss of a step."""
    file = (folder / "metrics.jsonl").open("a", encoding="ascii", buffering=1)
    return lambda seconds, loss: print(json.dumps({"seconds": seconds, "loss": loss}), file=file)


def _answer(rank: int, spec: dict[str, Any], ends: list[float], losses: list[float]) -> None:
    path = Path(spec["folder"]) / f"answer_{rank}.json"
    path.write_text(json.dumps({"ends": ends, "losses": losses}), encoding="utf-8")


def main() -> None:
    """Run what the argument describes, and write the answers."""
    specs = json.loads(sys.argv[1])
    Workload.from_spec(plan_of(Path(specs[0]["work"])).workload)  # imports the model file before ranks are forked
    for spec in specs:
        if spec["system"] == "plain":
            answer = in_processes(spec, plain_main, 1)
        else:
            answer = in_processes(spec, rank_main, plan_of(Path(spec["work"])).num_ranks)
        (Path(spec["folder"]) / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()

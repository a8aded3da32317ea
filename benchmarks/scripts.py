"""How fast ``autopipe run`` is: an unchanged script on four ranks, against ``python`` and against ``autopipe train``.

Forward and backward of each block sleep for a time that is proportional to the samples, as on devices of their own, so
four ranks of a small machine can be four times as fast. The script takes one batch a step, or accumulates the gradients
of eight; it reads its loss once a step, and keeps a running mean. The systems alternate. Reports medians of the seconds
of a step, without the first ones. Writes benchmarks/results/scripts_speed.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parent / "results" / "scripts_speed.md"
AUTOPIPE = str(Path(sys.executable).with_name("autopipe"))
RANKS, MICROBATCHES, SAMPLES, WARM_UP = 4, 8, 16, 4
MODEL = """
import time

import torch
from torch import nn


@torch.library.custom_op("sleeping::block", mutates_args=())
def block(x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds * len(x))
    return x * weight


@torch.library.custom_op("sleeping::block_backward", mutates_args=())
def block_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, seconds: float
) -> tuple[torch.Tensor, torch.Tensor]:
    time.sleep(2 * seconds * len(x))
    return gradient * weight, (gradient * x).sum(0)


@block.register_fake
def _(x, weight, seconds):
    return torch.empty_like(x)


@block_backward.register_fake
def _(gradient, x, weight, seconds):
    return torch.empty_like(gradient), torch.empty_like(weight)


def _setup(ctx, inputs, output):
    x, weight, ctx.seconds = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, gradient):
    return *torch.ops.sleeping.block_backward(gradient, *ctx.saved_tensors, ctx.seconds), None


block.register_autograd(_backward, setup_context=_setup)


class Block(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(16)), seconds

    def forward(self, x):
        return torch.ops.sleeping.block(x, self.weight, self.seconds)


def build_model(seconds=0.002):
    return nn.Sequential(*(Block(seconds) for _ in range(8)))


def loss(output, target):
    return (output - target).square().mean()


def data(batch_size=16):
    g = torch.Generator().manual_seed(0)
    while True:
        x = torch.rand(batch_size, 16, generator=g)
        yield x, 2 * x


def optimizer(parameters):
    return torch.optim.AdamW([tensor for _, tensor in parameters], lr=1e-3)
"""
SCRIPT = """
import json
import sys
import time

import torch
from sleeping import build_model, data, loss, optimizer

count, steps = int(sys.argv[1]), int(sys.argv[2])
model = build_model()
opt = optimizer(model.named_parameters())
batches = data(16 // count)
mean, ends = 0.0, []
for step in range(steps):
    opt.zero_grad()
    total = 0
    for _ in range(count):
        x, y = next(batches)
        value = loss(model(x), y) / count
        value.backward()
        total = total + value.detach()
    opt.step()
    mean = 0.9 * mean + 0.1 * total.item()
    ends.append(time.perf_counter())
print(json.dumps([mean, [b - a for a, b in zip(ends, ends[1:])]]))
"""
ONE_BATCH, ACCUMULATED = "one batch a step", f"{MICROBATCHES} batches a step"
CUT = ("--num-microbatches", str(MICROBATCHES))
REPLICAS = ("--replicas", str(RANKS))
STAGES = ("--replicas", "never")
SYSTEMS: dict[tuple[str, str], tuple[str, ...]] = {
    (ONE_BATCH, "python"): (),
    (ONE_BATCH, "run, stages"): (*CUT, *STAGES),
    (ONE_BATCH, "run, replicas"): (*CUT, *REPLICAS),
    (ACCUMULATED, "python"): (),
    (ACCUMULATED, "run, stages"): STAGES,
    (ACCUMULATED, "run, replicas"): REPLICAS,
    ("", "train, stages"): ("--schedule", "1f1b", *STAGES),
}


def measured(folder: Path, kind: str, system: str, steps: int) -> list[float]:
    """Return the seconds of steps after the first ones."""
    options = SYSTEMS[kind, system]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if system.startswith("train"):
        words = [
            AUTOPIPE,
            "train",
            "sleeping.py",
            "--gpus",
            str(RANKS),
            "--device",
            "cpu",
            "--no-check",
            *options,
            *CUT,
        ]
        words += ["--batch-size", str(SAMPLES), "--audit-every", "0", "--checkpoint-every", "0", "--json"]
        words += ["--steps", str(steps), "--work-dir", system, "--run-dir", f"{system}-{len(list(folder.iterdir()))}"]
    else:
        script = ["script.py", "1" if kind == ONE_BATCH else str(MICROBATCHES), str(steps)]
        run = [AUTOPIPE, "run", script[0], "--gpus", str(RANKS), "--check", "0", *options, "--", *script[1:]]
        words = [sys.executable, *script] if system == "python" else run
    process = subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = process.communicate()
    if process.returncode:
        raise SystemExit(f"{system}: {err}")
    if system.startswith("train"):
        plan = json.loads((folder / words[-1] / "plan.json").read_text())
        if len(plan["stages"]) != RANKS:
            raise SystemExit(f"{system}: another plan, of {len(plan['stages'])} stages")
        lines = (folder / words[-1] / "metrics.jsonl").read_text().splitlines()
        seconds = [line["step_seconds"] for line in map(json.loads, lines) if "step_seconds" in line]
    else:
        seconds = json.loads(out.splitlines()[-1])[1]
    return seconds[WARM_UP:]


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    times: dict[tuple[str, str], list[float]] = {key: [] for key in SYSTEMS}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "sleeping.py").write_text(MODEL)
        (folder / "script.py").write_text(SCRIPT)
        for number in range(options.rounds):
            for key in SYSTEMS:
                seconds = measured(folder, *key, options.steps)
                times[key] += seconds
                print(
                    f"round {number + 1}, {' '.join(key)}: {statistics.median(seconds):.3f} s",
                    flush=True,
                )
    RESULTS.write_text(table({key: statistics.median(own) for key, own in times.items()}, options))
    print(f"wrote {RESULTS}")


def table(seconds: dict[tuple[str, str], float], options: argparse.Namespace) -> str:
    """Return the page."""
    rows = []
    for kind in (ONE_BATCH, ACCUMULATED):
        for (own, system), value in seconds.items():
            if own not in ("", kind):
                continue
            peer = seconds["", "train, stages"] if system == "run, stages" else None
            of_train = f"{peer / value:.2f}" if peer else ""
            faster = seconds[kind, "python"] / value
            rows.append(f"| {kind} | {system} | {value:.3f} | {faster:.2f} | {of_train} |")
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    return f"""# The speed of an unchanged script under `autopipe run`

`python benchmarks/scripts.py`: {RANKS} ranks on {machine};
{options.rounds} rounds of {options.steps} steps, in turn. A block sleeps for 2 ms a sample forward and 4 ms backward,
and there are 8; a step has {SAMPLES} samples. The script takes one batch a step, which
`--num-microbatches {MICROBATCHES}` cuts, or accumulates the gradients of {MICROBATCHES} batches. It reads its loss once
a step. `train` runs the same model and optimizer with as many microbatches. Ideal is {RANKS} times python with
replicas, and {RANKS * MICROBATCHES / (MICROBATCHES + RANKS - 1):.2f} times with stages.

| script | system | s a step | times python | of train's speed |
|---|---|---:|---:|---:|
{chr(10).join(rows)}
"""


if __name__ == "__main__":
    main()

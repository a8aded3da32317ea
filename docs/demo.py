"""The demo: a GPT in two pipeline stages on two CPU processes, against the plain loop, step by step.

Profile, plan, train with two ranks, then the loop that anyone would write on the untouched model in one process: the
same batches, the same microbatches, the same seeds. The losses are printed side by side.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a rank has one thread, and so has the plain loop

import torch
from rich.console import Console
from rich.table import Table

import autopipe
from autopipe.cli.live import watching
from autopipe.cli.terminal import Terminal
from autopipe.report import tables
from autopipe.verify.plain import PlainSettings, plain_training
from autopipe.workload import LoadOptions, load_workload

MODEL = Path(__file__).resolve().parents[1] / "sample_models" / "gpt.py"
WIDTH = 110


def piped(pipe: autopipe.Pipeline, steps: int) -> tuple[list[float], float]:
    """Train on two ranks. Returns the losses and the seconds from the first step's end to the last one's."""
    marks: list[float] = []
    with watching(Terminal()) as show:

        def events(kind: str, fields: Mapping[str, Any]) -> None:
            if kind == "step":
                marks.append(fields["seconds"])
            if kind != "note":
                show(kind, fields)

        result = pipe.train(steps=steps, on_event=events)
    return list(result.losses), marks[-1] - marks[0]


def plain(batch_size: int, num_microbatches: int, count: int, say: Any) -> tuple[list[float], float]:
    """Train plainly, in this process, on one thread. Returns the same two."""
    torch.set_num_threads(1)
    workload = load_workload(LoadOptions(str(MODEL)))
    marks: list[float] = []

    def on_step(step: int, loss: float) -> None:
        marks.append(time.perf_counter())
        if sys.stderr.isatty() or (step + 1) % 10 == 0 or step + 1 == count:
            say(f"  step {step + 1}/{count}  loss {loss:.6f}")

    items = itertools.islice(workload.items(batch_size), count)
    settings = PlainSettings(num_microbatches, seed=0, draws=False)
    run = plain_training(workload, items, settings, on_step=on_step)
    return run.losses, marks[-1] - marks[0]


def side_by_side(ours: list[float], plainly: list[float]) -> Table:
    """Return some steps' losses with every digit that a float64 has."""
    table = Table(title="loss, all digits", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("step", "two ranks", "plain loop", ""):
        table.add_column(column, justify="right")
    shown = sorted({0, 1, 2, *range(9, len(ours), 10), len(ours) - 1} & set(range(len(ours))))
    for step in shown:
        same = "same" if ours[step] == plainly[step] else "DIFFERENT"
        table.add_row(str(step + 1), repr(ours[step]), repr(plainly[step]), same)
    return table


def main() -> int:
    """Show it all. Returns 1 where a loss differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-microbatches", type=int, default=8)
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False)
    with tempfile.TemporaryDirectory(prefix="autopipe-demo-") as folder:
        pipe = autopipe.Pipeline(
            MODEL,
            work_dir=folder,
            device="cpu",
            gpus=2,
            batch_size=options.batch_size,
            num_microbatches=options.num_microbatches,
            replicas="never",  # so that every digit is the plain loop's
        )
        terminal = Terminal()
        command = f"autopipe plan {MODEL.name} --gpus 2 --replicas never"
        console.print(f"1. {MODEL.name} is measured and cut into two stages ({command})")
        with terminal.progress() as progress:
            planned = pipe.plan(on_progress=progress)
        console.print(tables.stage_table(planned.plan, planned.cluster))
        console.print(tables.prediction_lines(planned.plan, planned.comparison.alone if planned.comparison else None))
        console.print("\n2. The schedule: a row a rank, time to the right (autopipe simulate)")
        for part in tables.simulation(pipe.simulate()):
            console.print(part, soft_wrap=True)
        console.print(f"\n3. {options.steps} steps on two ranks (autopipe train --steps {options.steps})")
        ours, our_seconds = piped(pipe, options.steps)
        console.print(f"\n4. The plain loop on the untouched model, one process, {options.steps} steps")
        plainly, plain_seconds = plain(options.batch_size, options.num_microbatches, options.steps, terminal.say)
    console.print()
    console.print(side_by_side(ours, plainly))
    return _verdict(console, options, ours == plainly, plain_seconds / our_seconds)


def _verdict(console: Console, options: argparse.Namespace, same: bool, ratio: float) -> int:
    m = options.num_microbatches
    bound = 2 * m / (m + 1)
    console.print()
    if same:
        console.print(f"All {options.steps} losses are the same to the last digit.")
    else:
        console.print("The losses differ. That is a bug: autopipe check names the parameter.")
    console.print(f"Two ranks were {ratio:.2f} times as fast as one process; {m} microbatches allow {bound:.2f}.")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores + 1:
        busy = f"The load is {load:.1f} on {cores} cores"
        console.print(f"({busy}: other programs run beside the demo, and the two ranks wait for them.)")
    console.print("\nWhat to try next:")
    console.print("  .venv/bin/autopipe check sample_models/resnet.py --gpus 2     every parameter, not only the loss")
    console.print("  .venv/bin/autopipe train YOUR_MODEL.py --gpus 2               a file of your own, as it is")
    console.print("  .venv/bin/autopipe --help")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

"""A sweep against plain loops: 16 settings of sample_models/gpt.py on two CPU processes.

Each plain training is a Python process of its own with one thread, one after the other. They use one core, so on two
devices they would take half of their sum. The sweep is the complete command, from its start to its end: it captures,
measures, plans, compares the first steps, and writes a checkpoint of every job. Processor time is that of all
processes. Writes benchmarks/results/sweep_overhead.md.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results" / "sweep_overhead.md"
RATES, SEEDS = (1e-3, 3e-4, 1e-4, 3e-3), (1, 2, 3, 4)
BATCH_SIZE, DEVICES = 32, 2
_PR_SET_CHILD_SUBREAPER = 36  # of sys/prctl.h
# what a user would write: the complete batch, the hooks of the file, one thread
PLAIN = """
import sys

import torch

torch.set_num_threads(1)
import gpt

lr, seed, steps, batch_size = float(sys.argv[1]), *map(int, sys.argv[2:5])
torch.manual_seed(seed)
model = gpt.build_model()
optimizer = gpt.optimizer(model.named_parameters())
for group in optimizer.param_groups:
    group["lr"] = lr
for step, (inputs, target) in zip(range(steps), gpt.data(batch_size)):
    loss = gpt.loss(model(inputs), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
torch.save(model.state_dict(), "plain.pt")
"""


@dataclass(frozen=True)
class Cost:
    """The seconds of a command: on the clock, and of the processor."""

    wall: float
    processor: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall + other.wall, self.processor + other.processor)


def cost_of(words: list[str], folder: Path) -> Cost:
    """Run a command, and return what it cost, with its descendants."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=environment, check=False)
    wall = time.monotonic() - begin
    assert done.returncode == 0, done.stderr
    with contextlib.suppress(ChildProcessError):
        while True:  # what the command leaves to be reaped: the servers of its processes
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(wall, processor)


def sweep_file(steps: int, settings: list[tuple[float, int]]) -> str:
    """Return the text of the sweep file."""
    entries = ", ".join(f"{{ lr = {lr}, seed = {seed} }}" for lr, seed in settings)
    return (
        f'devices = {DEVICES}\n[defaults]\nsteps = {steps}\nbatch-size = {BATCH_SIZE}\ndevice = "cpu"\n'
        f'[[job]]\ntarget = "gpt.py"\nlist = [{entries}]\n'
    )


def measured(folder: Path, steps: int, settings: list[tuple[float, int]], plains: int) -> tuple[Cost, Cost]:
    """Return the cost of the plain trainings, extrapolated from ``plains`` of them, and of the sweep."""
    shutil.copy(ROOT / "sample_models" / "gpt.py", folder)
    (folder / "plain.py").write_text(PLAIN)
    (folder / "sweep.toml").write_text(sweep_file(steps, settings))
    before, after = settings[: plains // 2], settings[plains // 2 : plains]  # of the sweep: the machine may change

    def plain(some: list[tuple[float, int]]) -> Cost:
        words = [[sys.executable, "plain.py", str(lr), str(seed), str(steps), str(BATCH_SIZE)] for lr, seed in some]
        return sum((cost_of(command, folder) for command in words), Cost(0.0, 0.0))

    first = plain(before)
    swept = cost_of([str(Path(sys.executable).with_name("autopipe")), "sweep", "sweep.toml"], folder)
    both = first + plain(after)
    share = len(settings) / plains
    return Cost(both.wall * share, both.processor * share), swept


def written(plain: Cost, swept: Cost, steps: int, settings: int, plains: int) -> str:
    """Return the page of results."""
    bound = plain.wall / DEVICES
    which = "" if plains == settings else f" ({plains} of them, extrapolated)"
    lines = ["# A sweep against plain loops", "", "`make bench-sweep` writes this: benchmarks/sweep_overhead.py.", ""]
    lines += [
        f"{settings} settings of sample_models/gpt.py, {steps} steps each, batches of {BATCH_SIZE}, one thread a "
    ]
    lines[-1] += f"process; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}."
    lines += ["The sweep is the complete command, with capture, measurement, comparison and checkpoints.", ""]
    lines += ["| | seconds | processor time |", "|---|---|---|"]
    lines += [f"| {settings} plain trainings, one after the other{which} | {plain.wall:.1f} | {plain.processor:.1f} |"]
    lines += [f"| half of that | {bound:.1f} | |"]
    lines += [f"| `autopipe sweep` on {DEVICES} processes | {swept.wall:.1f} | {swept.processor:.1f} |"]
    lines += [f"| relative to half of the plain trainings | **{swept.wall / bound:.3f}** | |"]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--settings", type=int, default=16)
    parser.add_argument("--plain", type=int, default=16, help="how many of the settings are trained plainly")
    given = parser.parse_args()
    # the descendants of an ended command become children of this process, so that their time is counted
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    settings = list(itertools.product(RATES, SEEDS))[: given.settings]
    with tempfile.TemporaryDirectory(prefix="sweep-") as scratch:
        plain, swept = measured(Path(scratch), given.steps, settings, given.plain)
    page = written(plain, swept, given.steps, len(settings), given.plain)
    RESULTS.write_text(page)
    sys.stdout.write(page)


if __name__ == "__main__":
    main()

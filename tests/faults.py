"""Single faults at random: what is done to whom and when, and the run that goes on afterwards.

``AUTOPIPE_FAULTS`` says how many, ``AUTOPIPE_FAULTS_SEED`` which ones; ``make chaos`` asks for many.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

AUTOPIPE = str(Path(sys.executable).with_name("autopipe"))
COUNT = int(os.environ.get("AUTOPIPE_FAULTS", "4"))
SEED = int(os.environ.get("AUTOPIPE_FAULTS_SEED", "0"))
STEPS, WATCHDOG = 60, 8.0
# beyond the watchdog; all hosts of a test share one machine with other programs
MOST_SECONDS = WATCHDOG + 10
TO_RANKS = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "SIGABRT": signal.SIGABRT, "SIGSTOP": signal.SIGSTOP}
OPTIONS = ["--device", "cpu", "--batch-size", "8", "--num-microbatches", "4", "--schedule", "1f1b"]
MODEL = """
import select
import torch
from torch import nn

def build_model():
    layers = [layer for _ in range(6) for layer in (nn.Linear(24, 24), nn.Tanh())]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(24, 1))

def loss(output, target):
    return (output - target).pow(2).mean()

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for step in range(60):
        select.select([], [], [], 0.05)  # a run of a few seconds
        yield torch.randn(batch_size, 24, generator=g), torch.randn(batch_size, 1, generator=g)
"""


@dataclass(frozen=True)
class Fault:
    """``kind``: a signal for rank ``whom``, or something that happens to host ``whom``. ``after``: how many steps."""

    kind: str
    whom: int
    after: int

    @staticmethod
    def at_random(number: int, others: Sequence[str], ranks: int) -> Fault:
        chance = random.Random(SEED * 1000 + number)
        kind = chance.choice([*TO_RANKS, *others])
        whom = chance.randrange(ranks) if kind in TO_RANKS else chance.randrange(2)
        return Fault(kind, whom, chance.choice([0, 1, 5, 17, 30]))

    def __str__(self) -> str:
        return f"{self.kind} {self.whom} after {self.after}"


def moment() -> None:
    select.select([], [], [], 0.05)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def start(command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )


def training(run_dir: str) -> list[str]:
    """Return the arguments of a run that something will happen to."""
    words = ["train", "--run-dir", run_dir, "--steps", str(STEPS), "--checkpoint-every", "7"]
    return [*words, "--watchdog", str(WATCHDOG)]


def run(*words: str, folder: Path) -> None:
    done = subprocess.run(
        [AUTOPIPE, *words], cwd=folder, capture_output=True, text=True, timeout=200, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr


def prepared(folder: Path, ranks: int) -> Path:
    """Leave in a folder a plan, and the weights of a run that nothing happened to."""
    (folder / "model.py").write_text(MODEL)
    run("plan", "model.py", "--gpus", str(ranks), *OPTIONS, folder=folder)
    run("train", "--steps", str(STEPS), "--run-dir", "undisturbed", folder=folder)
    run("export", "undisturbed", "-o", "undisturbed.pt", folder=folder)
    return folder


def steps_done(metrics: Path) -> int:
    return metrics.read_text().count('"loss"') if metrics.is_file() else 0


def assert_clear(fault: Fault, err: str, code: int, *, named: str, took: float) -> None:
    """Assert that a run that failed said so as it should."""
    assert "Traceback" not in err
    assert "bug in autopipe" not in err
    assert code in (1, 3) and "Error:" in err, err
    assert named in " ".join(err.partition("Error:")[2].split()), (str(fault), err)
    assert took < MOST_SECONDS, took


def assert_goes_on_to_equal_weights(folder: Path, run_dir: str) -> None:
    """Go on with a run, on this machine, and compare with the one that nothing happened to."""
    # a checkpoint is complete before ``latest`` names it
    saved = any((folder / run_dir / "checkpoints").glob("step-????????/manifest.json"))
    resume = ["--resume"] if saved else []
    run("train", "--steps", str(STEPS), "--run-dir", run_dir, *resume, folder=folder)
    run("export", run_dir, "-o", f"{run_dir}.pt", folder=folder)
    ours, theirs = torch.load(folder / "undisturbed.pt"), torch.load(folder / f"{run_dir}.pt")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

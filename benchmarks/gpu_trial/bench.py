"""What the trials share: commands in fresh processes with a time limit, and the comparison with the plain loop."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_trial import model

MODEL = Path(model.__file__)
COMMAND = Path(__file__).with_name("command.py")
MICROBATCHES = 8
BATCH = ("--batch-size", "16", "--num-microbatches", str(MICROBATCHES))
_DIFFERENCE = re.compile(r": differs by (\S+)")


class TrialError(Exception):
    """What a trial expects did not hold."""


@dataclass(slots=True)
class Bench:
    """The devices of the trials, and a folder for one of them."""

    folder: Path
    device: str
    ranks: int
    environment: dict[str, str] = field(default_factory=dict)  # how ranks that share a GPU exchange tensors
    seconds: float = 180.0  # for each trial
    end: float = 0.0  # of the trial, on the monotonic clock

    @property
    def words(self) -> list[str]:
        """Options of every command."""
        return ["--gpus", str(self.ranks), "--device", self.device]

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start ``autopipe`` in a process group of its own. Its stderr goes to the file ``stderr``."""
        env = os.environ | {"OMP_NUM_THREADS": "1"} | self.environment | environment
        with (self.folder / "stderr").open("w") as stderr:
            return subprocess.Popen(
                [sys.executable, str(COMMAND), *words],
                cwd=self.folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )

    def stderr(self) -> str:
        """What the last command wrote to stderr."""
        return (self.folder / "stderr").read_text()

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """Wait for a command until the trial's time is over. Return its exit code and stdout.

        Raises: TrialError on a timeout, after the end of all its processes.
        """
        try:
            out, _ = process.communicate(timeout=max(self.end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            raise TrialError(f"no end within {self.seconds:.0f} s: {_tail(self.stderr())}") from None
        finally:
            kill_group(process)
        return process.returncode, out

    def run(self, *words: str, **environment: str) -> Any:
        """Run ``autopipe`` and return its JSON document. Raises: TrialError if its exit code is not 0."""
        code, out = self.finish(self.start(*words, "--json", **environment))
        if code:
            raise TrialError(f"exit code {code}: {_tail(self.stderr())}")
        return json.loads(out)

    def train(self, *words: str, steps: int = 8, **environment: str) -> Any:
        """Train the model of the trials in the run directory ``run``, and return the JSON document."""
        fixed = [str(MODEL), *self.words, *BATCH, "--run-dir", "run", "--steps", str(steps), "--no-check"]
        return self.run("train", *fixed, *words, **environment)

    def difference(self) -> float:
        """Return the largest absolute difference between the run's weights and those of its plain loop on a CPU.

        Raises: TrialError if a parameter is missing.
        """
        self.run("plain", "run", "-o", "loop.py")
        self.run("export", "run", "-o", "weights.safetensors")
        limit = max(self.end - time.monotonic(), 1)
        line = [sys.executable, "loop.py", "weights.safetensors"]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                line, check=False, cwd=self.folder, env=env, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            raise TrialError(f"the plain loop did not end within {limit:.0f} s") from None
        if "tensors are equal, bit for bit" not in done.stdout + done.stderr or ": missing" in done.stdout:
            raise TrialError(f"the plain loop: {_tail(done.stdout + done.stderr)}")
        return max(map(float, _DIFFERENCE.findall(done.stdout)), default=0.0)

    def equal(self, tolerance: float) -> str:
        """Compare the run with its plain loop. Raises: TrialError if a weight differs by more than the tolerance."""
        difference = self.difference()
        text = f"weights differ by {difference:.1e} at most (tolerance {tolerance:g})"
        if not difference <= tolerance:  # also if it is not a number
            raise TrialError(text)
        return text


def kill_group(process: subprocess.Popen[str]) -> None:
    """End what a command has left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def versions() -> list[tuple[str, str]]:
    """Return what identifies the machine, as pairs of a name and a value."""
    rows = [("Python", sys.version.split()[0]), ("torch", torch.__version__), ("CPU cores", str(os.cpu_count()))]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        rows += [("GPUs", ", ".join(names)), ("CUDA", str(torch.version.cuda))]
        rows.append(("NCCL", ".".join(map(str, torch.cuda.nccl.version()))))  # type: ignore[no-untyped-call]
    return rows


def _tail(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-6:])[-700:]

"""What the trials share: commands in fresh processes with a time limit, and the comparison with the plain loop."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.gpu_trial import model

ROOT = Path(__file__).resolve().parents[2]
MODEL = Path(model.__file__)
COMMAND = Path(__file__).with_name("command.py")
MICROBATCHES = 8
BATCH = ("--batch-size", "16", "--num-microbatches", str(MICROBATCHES))


class TrialError(Exception):
    """What a trial expects did not hold."""


class NotRunError(Exception):
    """A trial cannot show anything here. The text is the reason."""


@dataclass(slots=True)
class Bench:
    """The devices of the trials, and a folder for one of them."""

    folder: Path
    device: str
    ranks: int
    environment: dict[str, str] = field(default_factory=dict)  # how ranks that share a GPU exchange tensors
    seconds: float = 180.0  # for each trial
    end: float = 0.0  # of the trial, on the monotonic clock
    loops: Path | None = None  # folder for the weights of plain loops, for all trials

    @property
    def work_dir(self) -> Path:
        """Where ``autopipe`` keeps the artifacts of the trial."""
        return self.folder / ".autopipe"

    @property
    def words(self) -> list[str]:
        """Options of every command."""
        return ["--gpus", str(self.ranks), "--device", self.device]

    def start(self, *words: str, log: str = "stderr", **environment: str) -> subprocess.Popen[str]:
        """Start ``autopipe`` in a process group of its own. Its stderr goes to the file ``log``."""
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        env = os.environ | own | self.environment | environment
        with (self.folder / log).open("w") as stderr:
            return subprocess.Popen(
                [sys.executable, str(COMMAND), *words],
                cwd=self.folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )

    def stderr(self, log: str = "stderr") -> str:
        """What the last command wrote to stderr."""
        return (self.folder / log).read_text()

    def output(self) -> str:
        """Return the end of what the last command and all ranks wrote."""
        files = [*sorted(self.folder.glob("stderr*")), *sorted(self.folder.glob("**/logs/rank_*"))]
        return "\n".join(f"-- {file.name}\n{file.read_text(errors='replace')[-4000:]}" for file in files)

    def finish(self, process: subprocess.Popen[str], log: str = "stderr") -> tuple[int, str]:
        """Wait for a command until the trial's time is over. Return its exit code and stdout.

        Raises: TrialError on a timeout, after the end of all its processes.
        """
        try:
            out, _ = process.communicate(timeout=max(self.end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            command = " ".join(process.args[2:4]) if isinstance(process.args, list) else ""
            raise TrialError(f"{command}: no end within the time of the trial: {_tail(self.stderr(log))}") from None
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

    def difference(self, run: str = "run") -> float:
        """Return the largest absolute difference between a run's weights and those of its plain loop on the device.

        Raises: TrialError if a parameter is missing.
        """
        export = self.start("export", run, "-o", "weights.safetensors", log="stderr-export")
        try:
            self.run("plain", run, "-o", "loop.py")
            plain = self._plain_weights()
        finally:
            code, _ = self.finish(export, "stderr-export")
        if code:
            raise TrialError(f"exit code {code}: {_tail(self.stderr('stderr-export'))}")
        trained = load_file(self.folder / "weights.safetensors")
        (self.folder / "loop.py").unlink()
        (self.folder / "weights.safetensors").unlink()
        if missing := sorted(plain.keys() - trained.keys()):
            raise TrialError(f"the exported weights lack {', '.join(missing)}")
        return max(float((plain[name].double() - trained[name].double()).abs().max()) for name in plain)

    def _plain_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights that ``loop.py`` trains. A loop that an earlier trial has run is not run again."""
        digest = hashlib.sha256((self.folder / "loop.py").read_bytes()).hexdigest()
        kept = (self.loops or self.folder) / f"{digest}.pt"
        if not kept.exists():
            limit = max(self.end - time.monotonic(), 1)
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            line = [sys.executable, "loop.py"]
            try:
                done = subprocess.run(
                    line, check=False, cwd=self.folder, env=env, capture_output=True, text=True, timeout=limit
                )
            except subprocess.TimeoutExpired:
                raise TrialError(f"the plain loop did not end within {limit:.0f} s") from None
            if not (self.folder / "plain.pt").exists():
                raise TrialError(f"the plain loop: {_tail(done.stdout + done.stderr)}")
            (self.folder / "plain.pt").rename(kept)
        weights: dict[str, torch.Tensor] = torch.load(kept, weights_only=True, map_location="cpu")
        return weights

    def equal(self, tolerance: float, run: str = "run") -> str:
        """Compare a run with its plain loop. Raises: TrialError if a weight differs by more than the tolerance."""
        difference = self.difference(run)
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
    errors = [index for index, line in enumerate(lines) if line.startswith("Error:")]
    return " / ".join(lines[errors[0] if errors else -6 :])[:700]

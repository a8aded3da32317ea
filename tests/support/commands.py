"""``autopipe train`` as a separate process, for tests that observe or interrupt it, and then remove all of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import psutil

from autopipe.ir import artifact
from autopipe.ir.plan import Plan

from .waiting import short_pause, under_load
from .warm.programs import AUTOPIPE, run_warm

STARTED = str(Path(__file__).with_name("warm") / "started.py")
MODEL = """
import torch
from torch import nn

WIDTH = 32

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 32), nn.ReLU())
        self.table = nn.Embedding(10, 32)
        self.last = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    def forward(self, x, index):
        return self.last(self.first(x) + self.table(index))

def loss(output, target):
    return (output - target).pow(2).mean()

def build_model():
    return Net()

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for step in range(%(steps)d):
        index = torch.randint(0, 10, (batch_size,), generator=g)
        if step == %(bad)d:
            index[6] = 99   # microbatch 3 of 4, two samples each
        x, y = torch.randn(batch_size, 8, generator=g), torch.randn(batch_size, 1, generator=g)
        yield (x * float("nan") if step == %(nan)d else x, index), y

evaluate_data = data
"""
# ranks are killed when they read a minibatch, each once, as soon as the run has a checkpoint; for ranks that read
EACH = "--data-reader", "each"
KILLS = """
import multiprocessing
import os
import pathlib
import select
import signal

kills = %(kills)r  # minibatch -> rank
undisturbed_data = data
def data(batch_size=24):
    here = pathlib.Path(__file__).parent
    for step, item in enumerate(undisturbed_data(batch_size)):
        mark = here / f"killed at {step}"
        if multiprocessing.current_process().name == f"rank {kills.get(step)}" and not mark.exists():
            while not (here / "run" / "checkpoints" / "latest").exists():
                select.select([], [], [], 0.01)
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield item
"""


def write_model(folder: Path, *, steps: int = 1_000_000, bad: int = -1, nan: int = -1) -> None:
    """Write model.py. ``bad``: the minibatch on which the model fails; ``nan``: the minibatch of NaNs."""
    (folder / "model.py").write_text(MODEL % {"steps": steps, "bad": bad, "nan": nan})


def training(ranks: int = 2, *, steps: int, run: str = "run", schedule: str = "1f1b") -> list[str]:
    """Return the arguments of a training of model.py."""
    words = ["train", "model.py", "--gpus", str(ranks), "--device", "cpu", "--batch-size", "8"]
    words += ["--microbatch-sizes", "2", "--num-microbatches", "4", "--schedule", schedule]
    return [*words, "--run-dir", run, "--steps", str(steps)]


def kill_ranks(model: Path, kills: dict[int, int]) -> None:
    """Let ranks of ``--run-dir run`` be killed while they train a model file. ``kills``: minibatch -> rank."""
    model.write_text(model.read_text() + KILLS % {"kills": kills})


class Commands:
    """Starts commands in a folder, and ends all of them with their ranks in ``end``.

    ``new``: a started command reads its data in a new process, too. ``temporary``: their folder for temporary files,
    whose path is short because it contains sockets.
    """

    def __init__(self, folder: Path, *, new: bool = False) -> None:
        self.folder, self.new = folder, new
        self.temporary = Path(tempfile.mkdtemp(prefix="ap-"))
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command."""
        command = [AUTOPIPE] if self.new else [sys.executable, STARTED, AUTOPIPE]
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=self._environment(),
        )
        self.started.append(process)
        return process

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}

    def run(self, *arguments: str, code: int = 0, seconds: float = 120) -> tuple[str, str]:
        """Run a command, assert its exit code, and return its stdout and stderr."""
        done = self.outcome(*arguments, seconds=seconds)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done.stdout, done.stderr

    def outcome(
        self, *arguments: str, environment: Mapping[str, str] = MappingProxyType({}), seconds: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, whatever its exit code. ``environment``: variables besides those of this process."""
        env = {**self._environment(), **environment}
        return run_warm(AUTOPIPE, *arguments, cwd=self.folder, env=env, timeout=seconds)

    def document(self, *arguments: str, code: int = 0, seconds: float = 120) -> dict[str, Any]:
        """Return the JSON document of a command."""
        out, _ = self.run(*arguments, "--json", code=code, seconds=seconds)
        document: dict[str, Any] = json.loads(out, parse_constant=_refused)
        return document

    def plain_loop(self, *arguments: str, steps: int) -> str:
        """Run the plain loop of ``run``, which has so many steps, without autopipe; return its output."""
        if not (self.folder / "loop.py").exists():
            assert self.document("plain", "run", "-o", "loop.py")["steps"] == steps
        loop = str(self.folder / "loop.py")
        done = run_warm(loop, *arguments, cwd=self.folder, env=self._environment(), without="autopipe")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """End all processes, and remove the temporary files."""
        for process in self.started:
            for child in descendants(process.pid):
                child.kill()
            if process.poll() is None:
                process.kill()
            process.communicate()
        shutil.rmtree(self.temporary, ignore_errors=True)


def _refused(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def descendants(pid: int) -> list[psutil.Process]:
    """Return the descendants of a process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def await_first_step(process: subprocess.Popen[str]) -> None:
    """Read what a training reports on stderr until it reports a step."""
    assert process.stderr is not None
    assert any(line.lstrip().startswith("step ") for line in process.stderr), "the command ended before its first step"


def wait_for_steps(
    folder: Path, process: subprocess.Popen[str], *, count: int = 3, seconds: float = 90.0
) -> list[psutil.Process]:
    """Wait until a run has done so many steps; return the processes of its ranks in order."""
    metrics = folder / "metrics.jsonl"
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if metrics.is_file() and metrics.read_text().count("\n") > count:
            ranks: dict[str, psutil.Process] = {}
            for child in descendants(process.pid):  # a rank comes before the processes that it has started
                log = [f.path for f in child.open_files() if "/logs/rank_" in f.path]
                for path in log[:1]:
                    ranks.setdefault(path, child)
            return [ranks[path] for path in sorted(ranks)]
        short_pause()
    out, err = process.communicate(timeout=5)
    raise AssertionError(f"no step within {seconds} s\n{out}\n{err}")


def stage_label(run: Path, stage: int) -> str:
    """Return a stage of a run as messages name it. Its modules depend on the measured profile."""
    return artifact.load(Plan, run / "plan.json", renew="").stages[stage].label


def fix_costs(work_dir: Path, seconds: Callable[[int], float] = lambda node: 1e-3) -> None:
    """Replace the measured times of a profile by given ones, so that the plan does not depend on the machine."""
    path = work_dir / "profile.json"
    profile = json.loads(path.read_text())
    for measurement in profile["measurements"]:
        for node, cost in enumerate(measurement["costs"].values()):
            cost["forward_seconds"] = cost["backward_seconds"] = seconds(node)
    del profile["digest"]
    path.write_text(json.dumps(profile))


def losses(run: Path) -> dict[int, float]:
    """Return the loss of each step of a run: of a step that was repeated, the last."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "samples_per_second" in line}


def assert_no_process_is_left(folder: Path) -> None:
    """Require that no process has this folder as its working directory, or wait until none has."""
    left = [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(folder)]
    _, alive = psutil.wait_procs(left, timeout=10)
    assert [(process.cmdline(), process.ppid()) for process in alive] == []


def assert_gone(processes: list[psutil.Process]) -> None:
    """Assert that all processes end within three seconds."""
    _, alive = psutil.wait_procs(processes, timeout=under_load(3))
    assert not alive, alive

"""A rank that fails, is killed or is interrupted: within seconds nothing is left, and the message names the cause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
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
        yield (torch.randn(batch_size, 8, generator=g), index), torch.randn(batch_size, 1, generator=g)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def begin(*, steps: int, bad: int = -1, ranks: int = 2) -> subprocess.Popen[str]:
        (tmp_path / "model.py").write_text(MODEL % {"steps": steps, "bad": bad})
        command = [str(Path(sys.executable).with_name("autopipe")), "train", "model.py", "--gpus", str(ranks)]
        command += ["--device", "cpu", "--batch-size", "8", "--num-microbatches", "4", "--schedule", "1f1b"]
        command += ["--run-dir", "run", "--steps", str(steps)]
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        for child in descendants(process.pid):
            child.kill()
        if process.poll() is None:
            process.kill()
        process.communicate()


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def wait_for_step(folder: Path, process: subprocess.Popen[str], seconds: float = 90.0) -> list[psutil.Process]:
    """Wait until training has begun; return the processes of the ranks."""
    metrics = folder / "run" / "metrics.jsonl"
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if metrics.is_file() and metrics.read_text().count("\n") > 3:
            ranks = []
            for child in descendants(process.pid):
                log = [f.path for f in child.open_files() if "/logs/rank_" in f.path]
                ranks.extend((path, child) for path in log[:1])
            return [child for _, child in sorted(ranks, key=lambda entry: entry[0])]
        select_a_moment()
    out, err = process.communicate(timeout=5)
    raise AssertionError(f"no step within {seconds} s\n{out}\n{err}")


def select_a_moment() -> None:
    import select

    select.select([], [], [], 0.05)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=3)
    assert not alive, alive


def test_the_users_own_error_is_shown_with_rank_stage_and_instruction(start, tmp_path: Path) -> None:
    process = start(steps=20, bad=2)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 3, (out, err)
    assert "index out of range" in err
    assert "stage 1" in err or "stage 0" in err
    assert "F3@2" in err or "F2:3@2" in err
    assert "stage_1.py:" in err or "stage_0.py:" in err
    assert "self.table(" in err
    assert "Connection closed" not in err
    assert "Traceback" not in err


def test_a_killed_rank_is_named_and_nothing_is_left(start, tmp_path: Path) -> None:
    process = start(steps=1_000_000)
    ranks = wait_for_step(tmp_path, process)
    assert len(ranks) == 2
    family = descendants(process.pid)
    ranks[1].kill()
    begin = time.monotonic()
    _, err = process.communicate(timeout=10)
    assert time.monotonic() - begin < 3
    assert process.returncode == 3
    assert "killed by SIGKILL" in err
    assert "rank 1, stage 1, instruction" in " ".join(err.split())
    assert_gone(family)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_an_interrupt_ends_everything_with_its_own_code(start, tmp_path: Path, number: int, code: int) -> None:
    process = start(steps=1_000_000)
    wait_for_step(tmp_path, process)
    family = descendants(process.pid)
    begin = time.monotonic()
    os.killpg(process.pid, signal.SIGINT) if number == signal.SIGINT else process.send_signal(number)
    process.communicate(timeout=10)
    assert time.monotonic() - begin < 3
    assert process.returncode == code
    assert_gone(family)


def test_a_killed_supervisor_leaves_no_orphan(start, tmp_path: Path) -> None:
    process = start(steps=1_000_000)
    wait_for_step(tmp_path, process)
    family = descendants(process.pid)
    process.kill()
    process.wait()
    assert_gone(family)


def test_a_failed_run_keeps_its_metrics(start, tmp_path: Path) -> None:
    process = start(steps=20, bad=5)
    process.communicate(timeout=120)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]

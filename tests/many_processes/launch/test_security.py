"""The security of a run: its open ports, its command lines in `ps`, and names with shell metacharacters."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.commands import Commands, await_first_step, descendants
from support.warm.programs import AUTOPIPE

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, token="", width=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x

def build_model(token="", width=8):
    return Net(token, width)

def loss(output, target):
    return (output - target).pow(2).mean()

def data(batch_size=8):
    generator = torch.Generator().manual_seed(0)
    for _ in range({batches}):
        x = torch.randn(batch_size, 8, generator=generator)
        yield x, x

evaluate_data = data
"""
GARBAGE = (b"\x00" * 64, b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 4096, b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.")


STRANGE = "a b'c\"d;touch pwned;$(touch pwned)`touch pwned`&|<>*?\\\n\N{SNOWMAN}"


@pytest.mark.timeout(240)
def test_no_name_reaches_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / STRANGE
    folder.mkdir()
    model = folder / f"{STRANGE}.py"
    model.write_text(MODEL.format(batches=3))
    work, out = str(folder / "wo rk$(touch pwned)"), str(folder / "out$(touch pwned) \n.safetensors")

    commands = Commands(folder)

    def run(*arguments: str, code: int = 0) -> Any:
        return commands.document(*arguments, "--work-dir", work, code=code)

    target = f"{model}:build_model"
    run("profile", target, "--device", "cpu", "--microbatch-sizes", "2", "--arg", "token=$(touch pwned)")
    run("plan", "--gpus", "2", "--num-microbatches", "4")
    assert len(run("generate")["files"]) == 2
    run("simulate")
    assert run("check", "--steps", "1")["equal"]
    result = run("train", "--steps", "2")
    assert result["steps"] == 2
    assert run("eval")["batches"] == 3
    assert run("export", "-o", out)["path"] == out
    assert Path(out).is_file()
    run("train", "--steps", "2", "--run-dir", f"{folder}/$(touch pwned)'\"")
    run("train", "$(touch pwned).py", "--gpus", "2", code=1)
    run("train", target, "--loss", "$(touch pwned):x", code=1)
    commands.end()
    assert not list(tmp_path.rglob("pwned"))


def ended(process: subprocess.Popen[str]) -> None:
    """End a run and assert that no process remains."""
    children = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        for child in children:
            child.kill()
        process.kill()
        raise
    assert psutil.wait_procs(children, timeout=10)[1] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of ``long_run``."""
    return tmp_path_factory.mktemp("long")


@pytest.fixture(scope="module")
def long_run(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a long run of two ranks that is training."""
    (folder / "net.py").write_text(MODEL.format(batches=10**6))
    arguments = ["train", "net.py", "--gpus", "2", "--device", "cpu", "--steps", "1000000", "--no-check", "--run-dir"]
    process = subprocess.Popen(
        [AUTOPIPE, *arguments, "run", "--microbatch-sizes", "2", "--num-microbatches", "4", "--arg", "token=hunter2"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        await_first_step(process)
        yield process
    finally:
        if process.poll() is None:
            ended(process)


def listeners(process: subprocess.Popen[str]) -> list[tuple[str, int]]:
    return [
        (connection.laddr.ip, connection.laddr.port)
        for one in (psutil.Process(process.pid), *descendants(process.pid))
        for connection in one.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]


@pytest.mark.timeout(120)
def test_a_run_ignores_connections_of_strangers(long_run: subprocess.Popen[str], folder: Path) -> None:
    addresses = listeners(long_run)
    assert {ip for ip, _ in addresses} <= {"127.0.0.1", "::1"}
    metrics = folder / "run" / "metrics.jsonl"
    for ip, port in addresses:
        for words in GARBAGE:
            with socket.create_connection((ip, port), timeout=5) as stranger:
                stranger.sendall(words)
                stranger.settimeout(0.2)
                with contextlib.suppress(OSError):  # a stranger gets no answer
                    stranger.recv(4096)
    before = len(metrics.read_text().splitlines())
    assert long_run.stderr is not None
    for line in long_run.stderr:  # the run continues: later steps are reported
        if line.lstrip().startswith("step ") and len(metrics.read_text().splitlines()) > before:
            break
    else:
        raise AssertionError("a stranger ended the run")
    assert all(json.loads(line)["loss"] < 1e3 for line in metrics.read_text().splitlines())
    assert not list(folder.rglob("pwned"))


@pytest.mark.timeout(120)
def test_arguments_of_the_model_are_not_in_the_command_lines_of_ranks(long_run: subprocess.Popen[str]) -> None:
    shown = [" ".join(child.cmdline()) for child in descendants(long_run.pid)]
    assert len(shown) >= 2
    assert not [line for line in shown if "hunter2" in line]


@pytest.mark.timeout(120)
def test_only_the_user_can_read_the_files_of_the_rendezvous(long_run: subprocess.Popen[str]) -> None:
    scratch = {
        Path(file.path)
        for one in (psutil.Process(long_run.pid), *descendants(long_run.pid))
        for file in one.open_files()
        if Path(file.path).parent.name.startswith("autopipe-")
    }
    assert all(path.parent.stat().st_mode & 0o077 == 0 for path in scratch if path.exists())

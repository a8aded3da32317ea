"""Signals reach the supervisor at any time, and a fork server that ends is replaced."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autopipe.errors import RunError, WorkerError
from autopipe.launch.rank.forked import ForkedRanks
from autopipe.launch.request import WorkerSpec
from autopipe.workers import fork_server
from autopipe.workers.signals import STOPPING, StopRequest, stop_signals_blocked

DEAF = "import signal; print(*sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"


def test_a_signal_that_comes_while_the_fork_server_is_started_is_not_lost() -> None:
    stop = StopRequest()
    with stop.on_signals():
        with stop_signals_blocked():
            os.kill(os.getpid(), signal.SIGUSR1)
            child = subprocess.run([sys.executable, "-c", DEAF], capture_output=True, text=True, check=True, timeout=60)
        assert stop.signal_name == "SIGUSR1"
    assert child.stdout.split() == [str(int(number)) for number in sorted(STOPPING)]


class Dying:
    """A process whose fork server dies a number of times."""

    left = 0

    def __init__(self, **given: Any) -> None:
        pass

    def start(self) -> None:
        if Dying.left:
            Dying.left -= 1
            raise EOFError("unexpected EOF")


@pytest.mark.parametrize(("deaths", "starts"), [(2, True), (1000, False)])
def test_a_fork_server_that_ends_is_replaced_and_not_mistaken_for_ctrl_c(
    deaths: int, starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Dying.left = deaths
    monkeypatch.setattr(fork_server, "preload", lambda: None)
    monkeypatch.setattr(fork_server, "_START_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(multiprocessing.get_context("forkserver"), "Process", Dying, raising=False)
    if starts:
        assert isinstance(fork_server.fork(print, (), name="rank 1"), Dying)
        return
    with pytest.raises(RunError, match="ended 20 times before this one started: rank 1"):
        fork_server.fork(print, (), name="rank 1")
    spec = WorkerSpec(
        run=str(tmp_path), rank=1, world_size=2, store="file:///x", heartbeats="", body="train", timeout_seconds=60.0
    )
    with pytest.raises(WorkerError, match="ended 20 times before this one started: rank 1"):
        ForkedRanks(tmp_path, 2).start(spec)


FORK_SERVER = """
import os
import sys
from multiprocessing import forkserver, resource_tracker

from autopipe.workers.fork_server import preload

preload()
print(forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid, os.getpid(), flush=True)
sys.stdin.read()
"""


def test_the_fork_server_ignores_the_signals_that_end_a_run() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORK_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        server, tracker, command = (int(word) for word in process.stdout.readline().split())
        try:
            assert ignored_by(server) == set(STOPPING)
            assert ignored_by(tracker) == set(STOPPING)
            assert ignored_by(command) & set(STOPPING) == set()
        finally:
            process.stdin.close()
            process.wait(30)


def ignored_by(pid: int) -> set[signal.Signals]:
    """Return which of the signals that end a run a process blocks or ignores."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    mask = int(status["SigBlk"], 16) | int(status["SigIgn"], 16)
    return {number for number in STOPPING if mask >> (number - 1) & 1}

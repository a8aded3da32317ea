"""A function in another process: its messages, its result and its errors arrive, and no process remains."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.apart import functions
from support.waiting import under_load, wait_until

from autopipe.commands.apart import process
from autopipe.commands.apart.errors import OtherProcessError, described, restored
from autopipe.commands.apart.process import run_apart
from autopipe.errors import (
    AutopipeError,
    InternalError,
    ModelFileError,
    ProfileError,
    RunError,
    TraceError,
    WorkerError,
)
from autopipe.launch.rank import forked
from autopipe.launch.rank.unguarded import WHAT
from autopipe.workload.model.size_limits import TooLargeError

HERE = Path(functions.__file__)


@pytest.fixture(params=["forked", "new"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run in a process of the fork server, or in a new one."""
    forked.preload()
    monkeypatch.setattr(process, "fork_server_runs", lambda: request.param == "forked")
    yield request.param
    assert not [p.pid for p in psutil.Process().children() if "apart" in " ".join(p.cmdline())]


def ignore(kind: str, fields: dict[str, Any]) -> None:
    """Ignore a message."""


def test_messages_and_result_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    received: list[tuple[str, dict[str, Any]]] = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with caplog.at_level(logging.INFO):
            result = run_apart(functions.report, {"a": [1, "ü"]}, lambda *m: received.append(m), doing="reporting")
    finally:
        torch.set_num_threads(before)
    assert received == [
        ("progress", {"what": "measuring", "fraction": 0.5}),
        ("captured", {"graph": "of the model"}),
    ]
    assert math.isnan(result.pop("nan"))
    pid = result.pop("pid")
    assert pid != os.getpid() and not psutil.pid_exists(pid)
    assert result == {"task": {"a": [1, "ü"]}, "folder": str(tmp_path), "threads": 3}
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("autopipe.measure", "WARNING", "size 1 is left out")
    ]


def test_a_handler_that_raises_ends_the_process() -> None:
    def refuse(kind: str, fields: dict[str, Any]) -> None:
        if kind == "captured":
            raise RunError("another model")

    with pytest.raises(RunError, match="another model"):
        run_apart(functions.report, None, refuse, doing="reporting")


@pytest.mark.parametrize(
    ("task", "error", "what", "where"),
    [
        ("user", ModelFileError, "your code raised AttributeError: 'str' object has no attribute 'missing'", str(HERE)),
        ("trace", TraceError, "cannot be captured", "net.py:3"),
        ("memory", RunError, "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB", ""),
        ("other", InternalError, "TypeError: Object of type Link is not JSON serializable", ""),
        ("exit", ModelFileError, "your code raised SystemExit: bye", str(HERE)),
    ],
)
def test_an_error_is_raised_as_in_one_process(task: str, error: type[AutopipeError], what: str, where: str) -> None:
    with pytest.raises(AutopipeError) as caught:
        run_apart(functions.fail, task, ignore, doing="failing")
    assert type(caught.value) is error
    assert caught.value.what == what and caught.value.where.startswith(where)
    assert caught.value.remedy
    cause = caught.value.__cause__
    assert isinstance(cause, OtherProcessError) and "in fail" in str(cause)


def test_an_error_of_the_system_keeps_its_number() -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        run_apart(functions.fail, "disk", ignore, doing="failing")
    assert (caught.value.errno, caught.value.filename) == (28, "/full/profile.json")


def test_a_process_that_is_killed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProfileError, match="measuring: the process was killed by SIGKILL") as killed:
        run_apart(functions.die, None, ignore, doing="measuring", failure=ProfileError, instead="--no-check")
    assert killed.value.remedy.startswith("free memory on this host") and killed.value.remedy.endswith(
        "; or --no-check"
    )
    with pytest.raises(RunError, match="exited with code 5 before it was finished") as ended:
        run_apart(functions.die, 5, ignore, doing="comparing")
    assert "extension" in ended.value.remedy
    with pytest.raises(RunError, match=WHAT):
        run_apart(functions.die, 93, ignore, doing="comparing")


def test_what_a_process_started_ends_also_if_it_ended_itself() -> None:
    pids: list[int] = []
    with pytest.raises(RunError, match="exited with code 4"):
        run_apart(functions.leave, 4, lambda kind, fields: pids.extend(fields["pids"]), doing="comparing")
    (pid,) = pids
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_an_interrupt_ends_the_process_and_what_it_started() -> None:
    pids: list[int] = []

    def interrupt(kind: str, fields: dict[str, Any]) -> None:
        pids.extend(fields["pids"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_apart(functions.wait, None, interrupt, doing="waiting")
    assert len(pids) == 2
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), under_load(5))


@pytest.mark.parametrize(
    "error",
    [
        TooLargeError("the model does not fit", remedy="a smaller one"),
        WorkerError("it failed", rank=2, host="h1", stage=1, instruction="1F0", out_of_memory={"used": 5}),
    ],
)
def test_every_field_of_an_error_crosses(error: AutopipeError) -> None:
    other = restored(described(error))
    assert type(other) is type(error) and str(other) == str(error) and vars(other) == vars(error)

"""A function in another process: its messages, its result and its errors arrive, and no process remains."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.waiting import under_load, wait_until
from support.workers import functions

from autopipe.errors import (
    AutopipeError,
    InternalError,
    ModelFileError,
    ProfileError,
    RunError,
    TraceError,
    WorkerError,
)
from autopipe.workers.errors import OtherProcessError, described, restored
from autopipe.workers.fork_server import preload
from autopipe.workers.task import Function
from autopipe.workers.worker import Handler, Worker, result_of
from autopipe.workload.model.size_limits import TooLargeError

HERE = Path(functions.__file__)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    preload()
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def run(function: Function, task: Any, handle: Handler, **options: Any) -> Any:
    return result_of(Worker(function, task, **options), handle)


def ignore(kind: str, fields: dict[str, Any]) -> None:
    """Ignore a message."""


def test_messages_and_result_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_LATER", "after the fork server has started")
    received: list[tuple[str, dict[str, Any]]] = []
    with caplog.at_level(logging.INFO):
        result = run(functions.report, {"a": [1, "ü"]}, lambda *m: received.append(m), doing="reporting", threads=3)
    assert received == [
        ("progress", {"what": "measuring", "fraction": 0.5}),
        ("captured", {"graph": "of the model"}),
    ]
    assert math.isnan(result.pop("nan"))
    pid = result.pop("pid")
    assert pid != os.getpid() and not psutil.pid_exists(pid)
    later = {"set": "after the fork server has started", "weighed": True}
    assert result == {"task": {"a": [1, "ü"]}, "folder": str(tmp_path), "threads": 3, **later}
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("autopipe.measure", "WARNING", "size 1 is left out")
    ]


def test_a_handler_that_raises_ends_the_process() -> None:
    def refuse(kind: str, fields: dict[str, Any]) -> None:
        if kind == "captured":
            raise RunError("another model")

    with pytest.raises(RunError, match="another model"):
        run(functions.report, None, refuse, doing="reporting")


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
        run(functions.fail, task, ignore, doing="failing")
    assert type(caught.value) is error
    assert caught.value.what == what and caught.value.where.startswith(where)
    assert caught.value.remedy
    cause = caught.value.__cause__
    assert isinstance(cause, OtherProcessError) and "in fail" in str(cause)


def test_an_error_of_the_system_keeps_its_number() -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        run(functions.fail, "disk", ignore, doing="failing")
    assert (caught.value.errno, caught.value.filename) == (28, "/full/profile.json")


def test_a_process_that_is_killed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProfileError, match="measuring: the process was killed by SIGKILL") as killed:
        run(functions.die, None, ignore, doing="measuring", failure=ProfileError, instead="--no-check")
    assert killed.value.remedy.startswith("free memory on this host") and killed.value.remedy.endswith(
        "; or --no-check"
    )
    with pytest.raises(RunError, match="exited with code 5 before it was finished") as ended:
        run(functions.die, 5, ignore, doing="comparing")
    assert "extension" in ended.value.remedy


def test_what_a_process_started_ends_also_if_it_ended_itself() -> None:
    pids: list[int] = []
    with pytest.raises(RunError, match="exited with code 4"):
        run(functions.leave, 4, lambda kind, fields: pids.extend(fields["pids"]), doing="comparing")
    (pid,) = pids
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_an_interrupt_ends_the_process_and_what_it_started() -> None:
    pids: list[int] = []

    def interrupt(kind: str, fields: dict[str, Any]) -> None:
        pids.extend(fields["pids"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(functions.wait, None, interrupt, doing="waiting")
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


def test_the_folder_of_a_command_that_was_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(RunError, match="comparing: the working directory was removed"):
        run(functions.report, None, ignore, doing="comparing")


def test_a_process_that_the_users_code_forks_can_be_ended() -> None:
    code = run(functions.end_child, {"seconds": under_load(20)}, ignore, doing="ending a process")
    assert code == -signal.SIGTERM

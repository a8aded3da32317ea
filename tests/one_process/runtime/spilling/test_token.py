"""The token of a device: one process computes at a time, the longest job next, and a process that ends releases it."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sweeps.holder import MOST_SECONDS, take_and_sleep

from autopipe.errors import RunError
from autopipe.runtime.spilling.token import DeviceToken, token_of
from autopipe.sweep.token_keeper import TokenKeeper

REMAINING = {1: 50.0, 2: 20.0, 3: 90.0}


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[TokenKeeper]:
    kept = TokenKeeper(tmp_path, REMAINING.__getitem__)
    yield kept
    kept.close()


def token(keeper: TokenKeeper, job: int, device: int = 0) -> DeviceToken:
    return DeviceToken(keeper.address(device, job), lambda _: None)


def path(keeper: TokenKeeper) -> str:
    return keeper.address(0, 1).split(":", 2)[2]


def until(keeper: TokenKeeper, holder: int | None) -> None:
    end = time.monotonic() + MOST_SECONDS
    while keeper.holder(0) != holder:
        assert time.monotonic() < end, f"job {keeper.holder(0)} has the token, not {holder}"
        time.sleep(0.001)


def waiting(client: DeviceToken) -> threading.Thread:
    """Return a thread that waits for the token; it has requested it."""
    thread = threading.Thread(target=client.take, daemon=True)
    thread.start()
    time.sleep(0.05)  # what follows is true without it, too; it would only test less
    return thread


def test_the_longest_of_those_that_wait_is_next(keeper: TokenKeeper) -> None:
    clients = {job: token(keeper, job) for job in REMAINING}
    clients[2].take()
    threads = [waiting(clients[job]) for job in (1, 3)]
    until(keeper, 2)
    order = []
    for job in (2, 3, 1):
        until(keeper, job)
        order.append(job)
        for thread, other in zip(threads, (1, 3), strict=True):
            if other == job:
                thread.join(MOST_SECONDS)
        clients[job].give()
    assert order == [2, 3, 1]
    for client in clients.values():
        client.close()


def test_tokens_of_two_devices_are_independent(keeper: TokenKeeper) -> None:
    first, second = token(keeper, 1, device=0), token(keeper, 2, device=1)
    first.take()
    second.take()
    assert (keeper.holder(0), keeper.holder(1)) == (1, 2)
    first.close()
    second.close()


def test_taking_twice_and_giving_twice_changes_nothing(keeper: TokenKeeper) -> None:
    client = token(keeper, 1)
    client.give()
    client.take()
    client.take()
    client.give()
    client.give()
    client.take()
    until(keeper, 1)
    client.close()
    until(keeper, None)


def test_a_killed_holder_releases_it_though_its_child_lives(keeper: TokenKeeper) -> None:
    context = multiprocessing.get_context("spawn")
    ready, child = context.Event(), context.Event()
    process = context.Process(target=take_and_sleep, args=(keeper.address(0, 3), ready, child))
    process.start()
    assert ready.wait(MOST_SECONDS) and child.wait(MOST_SECONDS)
    other = token(keeper, 1)
    thread = waiting(other)
    assert keeper.holder(0) == 3
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    thread.join(MOST_SECONDS)
    assert keeper.holder(0) == 1
    process.join()
    other.close()


def test_a_wait_is_reported_and_ends_with_the_keeper(tmp_path: Path) -> None:
    keeper = TokenKeeper(tmp_path, REMAINING.__getitem__)
    first = token(keeper, 1)
    first.take()
    reports: list[str] = []
    second = DeviceToken(keeper.address(0, 2), reports.append)
    errors: list[BaseException] = []

    def take() -> None:
        try:
            second.take()
        except RunError as error:
            errors.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    while not reports:
        time.sleep(0.01)
    keeper.close()
    thread.join(MOST_SECONDS)
    assert reports[0] == "wait for the token of device 0"
    assert "token of device 0" in str(errors[0]) and "--resume" in str(errors[0])
    with pytest.raises(RunError, match="token of device 0"):
        first.give()
        first.take()
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_only_this_user_may_enter_the_folder_of_the_socket(keeper: TokenKeeper, tmp_path: Path) -> None:
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_long_folder_has_a_socket_too(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 100) / ("b" * 100)
    folder.mkdir(parents=True)
    keeper = TokenKeeper(folder, REMAINING.__getitem__)
    client = token(keeper, 1)
    client.take()
    assert keeper.holder(0) == 1
    client.close()
    keeper.close()


def test_an_address_without_a_keeper_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot connect to .*token"):
        DeviceToken(f"0:1:{tmp_path / 'token'}", lambda _: None)
    with pytest.raises(RunError, match="is not DEVICE:JOB:SOCKET"):
        token_of({"AUTOPIPE_DEVICE_TOKEN": "somewhere"}, lambda _: None)
    assert token_of({}, lambda _: None) is None


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\n",
        b"x:y\n",
        b"0\n",
        b"-1:2\n",
        b"0:1:2\n",
        b"0:9\nt",
        b"0:1\nq",
        b"0:1\ntt",
        b"0:1\ng",
        b"1" * 500,
        b"\xff" * 9,
    ],
)
def test_a_process_that_sends_anything_else_is_dropped_alone(keeper: TokenKeeper, rubbish: bytes) -> None:
    first = token(keeper, 1)
    first.take()
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.settimeout(MOST_SECONDS)
    stranger.connect(path(keeper))
    stranger.sendall(rubbish)
    with contextlib.suppress(ConnectionError):  # it was dropped with unread bytes
        assert stranger.recv(1) == b""
    first.give()
    first.take()
    until(keeper, 1)
    stranger.close()
    first.close()


def test_a_failed_accept_ends_nothing(keeper: TokenKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    first = token(keeper, 1)
    first.take()
    opened, failures = os.pidfd_open, [OSError(errno.EMFILE, "too many open files")]

    def fail_once(process: int) -> int:
        if failures:
            raise failures.pop()
        return opened(process)

    monkeypatch.setattr(os, "pidfd_open", fail_once)
    refused = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    refused.connect(path(keeper))
    with contextlib.suppress(ConnectionError):
        assert refused.recv(1) == b""
    accepted = token(keeper, 3)
    first.give()
    accepted.take()
    until(keeper, 3)
    for client in (first, refused, accepted):
        client.close()


def test_a_read_of_nothing_drops_no_process(keeper: TokenKeeper) -> None:
    first = token(keeper, 1)
    first.take()
    (client,) = keeper._clients
    keeper._serve(client, ended=False)  # nothing is there, as after a spurious wake-up
    until(keeper, 1)
    first.give()
    until(keeper, None)
    first.close()

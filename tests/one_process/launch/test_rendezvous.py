"""Rank 0 and the processes of the other ranks: which are admitted, and how failures are reported on each side."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe import __version__
from autopipe.errors import AutopipeError, RunError, WorkerError
from autopipe.launch.remote import network
from autopipe.launch.remote.peer import connect, follow
from autopipe.launch.remote.protocol import End, Event, Finish, Message, Signaled, Start
from autopipe.launch.remote.rank_environment import RankIdentity
from autopipe.launch.remote.rendezvous import Rendezvous
from autopipe.launch.remote.stream import MessageStream, StreamError, wait_readable
from autopipe.launch.request import WorkerSpec
from autopipe.workers.signals import STOPPING, StopRequest


@pytest.fixture(autouse=True)
def as_if_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let both sides run in one process, which keeps its signals and does not end."""
    monkeypatch.setattr("autopipe.launch.remote.peer.LEAVE_SECONDS", 0.1)
    monkeypatch.setattr("autopipe.launch.remote.peer.preload", lambda: None)
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def membership(rank: int, world_size: int = 2, port: int = 0) -> RankIdentity:
    return RankIdentity(
        launcher="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        address="127.0.0.1",
        port=port,
    )


@contextlib.contextmanager
def opened(world_size: int = 2) -> Iterator[tuple[Rendezvous, int]]:
    listener = network.listen("127.0.0.1")
    rendezvous = Rendezvous(membership(0, world_size), listener)
    try:
        yield rendezvous, listener.getsockname()[1]
    finally:
        rendezvous.close()


def knock(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def hello(rank: int, world_size: int = 2, version: str = __version__, **changes: Any) -> bytes:
    message = {"kind": "Hello", "version": version, "rank": rank, "world_size": world_size, "local_rank": rank}
    return json.dumps({**message, "local_world_size": world_size, "host": f"host{rank}", **changes}).encode() + b"\n"


# -- admission -----------------------------------------------------------------------------------------------------


def test_a_peer_with_the_right_credentials_is_admitted() -> None:
    with opened(3) as (rendezvous, port), knock(port) as one, knock(port) as two:
        one.sendall(hello(2, 3))
        two.sendall(hello(1, 3))
        rendezvous.gather(5)
        assert {rank: peer.host for rank, peer in rendezvous.peers.items()} == {1: "host1", 2: "host2"}


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04\x95\n",
        b"{}\n",
        b"[]\n",
        b'{"kind": "Hello"}\n',
        hello(True),
        hello(1, host=7),
        hello(1)[:-1].replace(b'"rank": 1', b'"rank": "1"') + b"\n",
    ],
)
def test_a_stranger_is_rejected_and_changes_nothing(nonsense: bytes) -> None:
    with opened() as (rendezvous, port), knock(port) as stranger, knock(port) as one:
        stranger.sendall(nonsense)
        one.sendall(hello(1))
        rendezvous.gather(5)
        assert sorted(rendezvous.peers) == [1]


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=40)
def test_no_bytes_of_a_stranger_end_rank_0(message: bytes) -> None:
    with opened() as (rendezvous, port), knock(port) as stranger, knock(port) as one:
        stranger.sendall(message + b"\n")
        one.sendall(hello(1))
        rendezvous.gather(5)
        assert sorted(rendezvous.peers) == [1]


def test_another_version_is_rejected_on_both_sides_with_both_versions() -> None:
    with opened() as (rendezvous, port), knock(port) as one:
        one.sendall(hello(1, version="0.0.1"))
        with pytest.raises(RunError, match=f"host1 has autopipe 0.0.1, and rank 0 has {__version__}"):
            rendezvous.gather(5)
        assert json.loads(one.recv(4096))["what"].startswith("host1 has autopipe 0.0.1")


def test_a_rank_that_connects_twice_is_rejected() -> None:
    with opened(3) as (rendezvous, port), knock(port) as one, knock(port) as two:
        one.sendall(hello(1, 3))
        two.sendall(hello(1, 3, host="elsewhere"))
        with pytest.raises(RunError, match="rank 1 connected twice"):
            rendezvous.gather(5)


def test_another_number_of_ranks_is_rejected_with_both_numbers() -> None:
    with opened() as (rendezvous, port), knock(port) as one:
        one.sendall(hello(1, 4))
        with pytest.raises(RunError, match="rank 1 on host1 was started as one of 4 ranks, and rank 0 as one of 2"):
            rendezvous.gather(5)


def test_missing_ranks_are_named() -> None:
    with opened(4) as (rendezvous, port), knock(port) as one:
        one.sendall(hello(2, 4))
        with pytest.raises(RunError, match=r"2 ranks of 4 did not connect .*: 1, 3"):
            rendezvous.gather(0.3)


def test_a_process_that_ended_is_named() -> None:
    with opened(3) as (rendezvous, port), knock(port) as one:
        one.sendall(hello(1, 3))
        with pytest.raises(RunError, match="did not connect"):
            rendezvous.gather(0.3)
        one.close()
        with pytest.raises(RunError, match="rank 1 on host1 disconnected"):
            rendezvous.gather(5)


# -- the end ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def led(error: BaseException | None) -> Iterator[int]:
    """Run as rank 0 in a thread: admit one peer, then raise the error, or finish."""

    def lead(rendezvous: Rendezvous) -> None:
        if error is None:
            rendezvous.gather(5)
            rendezvous.finish(0)
        else:
            rendezvous.fail(error)

    with opened() as (rendezvous, port):
        thread = threading.Thread(target=lead, args=(rendezvous,))
        thread.start()
        try:
            yield port
        finally:
            thread.join(20)
            assert not thread.is_alive()


def followed(port: int) -> int:
    return follow(membership(1, port=port), connect("127.0.0.1", port, 5))


def test_a_completed_run_ends_without_error_on_every_rank() -> None:
    with led(None) as port:
        assert followed(port) == 0


def test_every_rank_ends_with_the_message_of_the_first_failure() -> None:
    failure = WorkerError("ValueError: boom", rank=1, stage=2, instruction="2F3@0", where="model.py:7", remedy="mend")
    with led(failure) as port, pytest.raises(AutopipeError) as caught:
        followed(port)
    assert str(caught.value) == str(failure)
    assert caught.value.exit_code == 3


def test_an_interrupt_of_rank_0_interrupts_every_rank() -> None:
    with led(KeyboardInterrupt()) as port, pytest.raises(KeyboardInterrupt):
        followed(port)


def test_a_signal_ends_rank_0_while_it_waits_for_the_others() -> None:
    stop = StopRequest()
    stop.ask("SIGTERM")
    with opened() as (rendezvous, _), pytest.raises(KeyboardInterrupt):
        rendezvous.gather(stop=stop)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_rank_that_waits_for_its_start(number: signal.Signals) -> None:
    with opened(3) as (_, port):
        timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), number))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            follow(membership(1, 3, port), connect("127.0.0.1", port))
        timer.join()


def test_an_exception_of_rank_0_is_forwarded_without_its_traceback() -> None:
    with led(ValueError("odd")) as port, pytest.raises(AutopipeError, match="rank 0: ValueError: odd"):
        followed(port)


def test_a_lost_rank_0_is_named() -> None:
    with network.listen("127.0.0.1") as listener:

        def vanish() -> None:
            wire = MessageStream.over(listener.accept()[0])
            received(wire)
            wire.close()

        thread = threading.Thread(target=vanish)
        thread.start()
        with pytest.raises(RunError, match="the process of rank 0 is gone"):
            followed(listener.getsockname()[1])
        thread.join(5)


def test_the_wait_for_rank_0_has_a_timeout() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        with pytest.raises(RunError, match=r"rank 0 does not answer at 127\.0\.0\.1 port"):
            connect("127.0.0.1", listener.getsockname()[1], 0.3)


def test_a_run_directory_that_is_not_shared_is_refused_with_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopipe.launch.remote.rank_host.VISIBLE_SECONDS", 0.2)
    spec = WorkerSpec(
        run="/none",
        rank=1,
        world_size=2,
        store="tcp://127.0.0.1:1",
        heartbeats="",
        body="train",
        timeout_seconds=60.0,
    )
    seen: list[Message] = []
    with network.listen("127.0.0.1") as listener:

        def lead() -> None:
            wire = MessageStream.over(listener.accept()[0])
            wire.send(Start(1, (spec,), job="/none/job.json", digest="0" * 64))
            while not any(isinstance(message, Event) for message in seen):
                seen.extend(received(wire))
            wire.send(Finish(0))
            wire.close()

        thread = threading.Thread(target=lead)
        thread.start()
        followed(listener.getsockname()[1])
        thread.join(5)
    event = next(message.event for message in seen if isinstance(message, Event))
    assert (event["kind"], event["rank"], event["secondary"]) == ("error", 1, False)
    assert "the run directory is not the same on" in event["message"]


def received(stream: MessageStream) -> list[Message]:
    wait_readable([stream], 5)
    return stream.receive()


# -- the wire --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def wired() -> Iterator[tuple[MessageStream, socket.socket]]:
    with network.listen("127.0.0.1") as listener, knock(listener.getsockname()[1]) as other:
        wire = MessageStream.over(listener.accept()[0])
        try:
            yield wire, other
        finally:
            wire.close()


def test_messages_arrive_complete_however_they_are_split() -> None:
    with wired() as (wire, other):
        other.sendall(b'{"kind": "Signaled", "attempt": 1, "signal": "\xc3')
        assert received(wire) == []
        other.sendall(b'\xa9"}\n{"kind": "End"}\n{"ki')
        assert received(wire) == [Signaled(1, "é"), End()]


@pytest.mark.parametrize("line", [b"nonsense\n", b"[1]\n", b'{"kind": 1}\n', b"[" * 100_000 + b"\n", b"\xff\n"])
def test_invalid_bytes_are_a_protocol_error(line: bytes) -> None:
    with wired() as (wire, other), pytest.raises(StreamError):
        other.sendall(line)
        for _ in range(10):
            received(wire)


def test_the_end_of_a_connection_is_a_protocol_error() -> None:
    with wired() as (wire, other):
        other.close()
        with pytest.raises(StreamError, match="closed"):
            received(wire)

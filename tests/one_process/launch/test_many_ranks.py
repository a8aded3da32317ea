"""What the control plane does for many ranks, counted: connections, messages and reads."""

from __future__ import annotations

import multiprocessing
import socket
from pathlib import Path
from typing import Any

import pytest

from autopipe import __version__
from autopipe.launch.rank.heartbeat import Beat
from autopipe.launch.remote import network, protocol, rank_host, remote_ranks
from autopipe.launch.remote.connections import Connections
from autopipe.launch.remote.rank_environment import RankIdentity
from autopipe.launch.remote.rank_host import RankHost
from autopipe.launch.remote.rendezvous import Member, Rendezvous
from autopipe.launch.remote.stream import MessageStream
from autopipe.launch.request import WorkerSpec

RANKS = 64


def hello(rank: int) -> protocol.Hello:
    return protocol.Hello(__version__, rank, RANKS, rank % 8, 8, f"host{rank // 8}")


def test_ranks_that_connect_at_once_are_admitted_together(monkeypatch):
    """All are accepted in one turn of the loop, and introduced in the next."""
    listener = network.listen("127.0.0.1")
    address = listener.getsockname()
    identity = RankIdentity(
        launcher="torchrun", rank=0, world_size=RANKS, local_rank=0, local_world_size=8, address="127.0.0.1",
        port=address[1],
    )  # fmt: skip
    rendezvous = Rendezvous(identity, listener)
    streams = [MessageStream.over(socket.create_connection(address, timeout=5)) for _ in range(1, RANKS)]
    for rank, stream in enumerate(streams, start=1):
        stream.send(hello(rank))
    turns = 0
    admit = rendezvous._admit

    def counted(timeout: float) -> None:
        nonlocal turns
        turns += 1
        admit(timeout)

    monkeypatch.setattr(rendezvous, "_admit", counted)
    rendezvous.gather(10)
    assert sorted(rendezvous.peers) == list(range(1, RANKS))
    assert turns <= 4
    rendezvous.close()
    for stream in streams:
        stream.close()


def test_rank_0_may_open_a_descriptor_for_each_rank(monkeypatch):
    limits = [(1024, 1 << 20)]
    monkeypatch.setattr(network.resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(network.resource, "setrlimit", lambda kind, values: limits.append(values))
    network.allow_descriptors(4352)
    network.allow_descriptors(512)
    network.allow_descriptors(1 << 30)
    assert limits[1:] == [(4352, 1 << 20), (1 << 20, 1 << 20)]


class Moving:
    """The ranks of a host, of which the even ones move."""

    def __init__(self) -> None:
        self.reads, self.count, self.stop = 0, 0, -1

    def beat(self, rank: int) -> Beat:
        self.reads += 1
        return Beat(self.count if rank % 2 == 0 else 0, 0.0, False, "0F0@0", 0, self.stop)


def test_a_host_sends_one_message_each_second_about_the_ranks_that_moved(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(rank_host.time, "monotonic", lambda: now[0])
    sent: list[Any] = []
    host, ranks = RankHost(Path(), sent.append), Moving()
    host._ranks, host._numbers = ranks, [8, 9, 10, 11]  # type: ignore[assignment]
    calls = round(60 / protocol.BEAT_SECONDS)
    for _ in range(calls):
        ranks.count += 1
        host.send_beats(now=False)
        now[0] += protocol.BEAT_SECONDS
    assert len(sent) == 60
    assert [len(message.beats) for message in sent] == [4] + [2] * 59
    assert ranks.reads == 4 * calls  # of 64 records, its own only
    ranks.stop = 7  # the agreement on a stop waits for every heartbeat
    sent.clear()
    for _ in range(8):
        host.send_beats(now=False)
        now[0] += protocol.BEAT_SECONDS
    assert [len(message.beats) for message in sent] == [4] + [0] * 7


def test_a_rank_that_cannot_be_started_is_an_error_of_that_rank(tmp_path):
    sent: list[Any] = []
    host = RankHost(tmp_path / "none", sent.append)
    spec = WorkerSpec(
        run="/none", rank=3, world_size=4, store="tcp://127.0.0.1:1", heartbeats="", body="train", timeout_seconds=60.0
    )
    port = host.listen("127.0.0.1")
    host.handle(protocol.Start(2, (spec,)))
    (event,) = sent
    assert (event.attempt, event.event["kind"], event.event["rank"]) == (2, "error", 3)
    assert "No such file or directory" in event.event["message"] and remote_ranks.problem(event.event) == ""
    assert network.reach("127.0.0.1", port, 1.0) != ""  # nothing listens any more


def test_only_connections_with_messages_are_read(monkeypatch):
    pairs = [socket.socketpair() for _ in range(RANKS)]
    peers = [Member(hello(rank), MessageStream(own, own)) for rank, (own, _) in enumerate(pairs)]
    reads: list[int] = []
    receive = Member.receive
    monkeypatch.setattr(Member, "receive", lambda peer: (reads.append(peer.hello.rank), receive(peer))[1])
    connections = Connections(peers)
    ended = protocol.Ended(1)
    for rank in (3, 40, 3):
        pairs[rank][1].sendall(protocol.encode(ended))
        assert list(connections.receive(5.0)) == [(rank, ended)]
    assert reads == [3, 40, 3]
    pairs[5][1].close()
    ((index, lost),) = connections.receive(5.0)
    assert index == 5 and "is gone" in lost.message
    assert list(connections.receive(0)) == []
    receiving, sending = multiprocessing.Pipe(duplex=False)
    assert list(connections.receive(0, [receiving])) == []
    receiving.close()  # a closed pipe raises if it is asked for its descriptor
    sending.close()
    assert list(connections.receive(0)) == []
    for own, other in pairs:
        own.close()
        other.close()


@pytest.mark.parametrize(
    "changes",
    [{"rank": True}, {"age": "1"}, {"count": 1.0}, {"waiting": 0}, {"doing": None}, {"bound": "1"}, {"stop": None}],
)
def test_a_heartbeat_with_a_wrong_field_is_not_a_message(changes):
    beat = {"rank": 1, "age": 0.5, "count": 2, "waiting": True, "doing": "1F0@0", "bound": 3, "stop": -1}

    def line(fields: dict[str, Any]) -> bytes:
        return protocol.json.dumps({"kind": "Beats", "attempt": 1, "beats": [fields]}).encode()

    assert protocol.decode(line(beat)) == protocol.Beats(1, (protocol.RankBeat(**beat),))
    with pytest.raises(ValueError, match="not a heartbeat"):
        protocol.decode(line(beat | changes))

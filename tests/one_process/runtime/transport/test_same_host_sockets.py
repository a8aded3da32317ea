"""Connections between ranks of one host: which ranks connect, who may, and how a lost one is reported."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from autopipe.ir.messages import ACTIVATION, Channel
from autopipe.runtime.transport import same_host_sockets
from autopipe.runtime.transport.base import TransportClosed, translate
from autopipe.runtime.transport.same_host_sockets import Neighbours

CHAIN = [Channel(ACTIVATION, a, a + 1, a, a + 1) for a in range(3)]
LIMIT = 20.0


def connected(world: int, seconds: float = LIMIT) -> list[Neighbours]:
    """Connect the ranks of a chain, each in a thread."""
    store = dist.HashStore()
    with ThreadPoolExecutor(world) as pool:
        pending = [pool.submit(Neighbours.connect, store, rank, CHAIN[: world - 1], seconds) for rank in range(world)]
        return [each.result(LIMIT) for each in pending]


def partners(ranks: list[Neighbours]) -> list[list[int]]:
    return [[other for other in range(len(ranks)) if rank.to(other, 1) is not None] for rank in ranks]


@pytest.fixture
def pair() -> Iterator[list[Neighbours]]:
    ranks = connected(2, 0.2)
    yield ranks
    for rank in ranks:
        rank.close()


def test_ranks_connect_to_those_that_they_exchange_messages_with():
    ranks = connected(4)
    assert partners(ranks) == [[1], [0, 2], [1, 3], [2]]
    assert ranks[0].to(1, 1 << 30) is None  # a large message travels over gloo
    for rank in ranks:
        rank.close()


def test_ranks_of_different_hosts_do_not_connect(monkeypatch):
    hosts = iter(["here", "there"])
    monkeypatch.setattr(same_host_sockets, "_host", lambda: next(hosts))
    assert partners(connected(2)) == [[], []]


def test_a_system_without_such_sockets_uses_gloo(monkeypatch):
    def fails() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(same_host_sockets, "_host", fails)
    assert partners(connected(2)) == [[], []]


@pytest.mark.parametrize("hello", [b"", b"short", b"\0" * 36, b"\0" * 100])
def test_a_stranger_is_rejected(hello, monkeypatch):
    monkeypatch.setattr(same_host_sockets, "_HELLO_SECONDS", 0.1)
    bound = threading.Event()
    set_key = dist.HashStore.set

    class Store(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            if key == same_host_sockets._key(1):  # the listener is there, and rank 0 does not know it yet
                stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                stranger.connect(same_host_sockets._address(value.split(" ")[1]))
                stranger.sendall(hello)
                strangers.append(stranger)
                bound.set()
            set_key(self, key, value)

    strangers: list[socket.socket] = []
    store = Store()
    with ThreadPoolExecutor(2) as pool:
        pending = [pool.submit(Neighbours.connect, store, rank, CHAIN[:1], LIMIT) for rank in range(2)]
        ranks = [each.result(LIMIT) for each in pending]
    assert bound.is_set()
    for other in strangers:
        other.close()
    assert partners(ranks) == [[1], [0]]
    for rank in ranks:
        rank.close()


def test_a_message_that_is_shorter_than_its_buffer(pair):
    pair[0].to(1, 1).send(7, torch.arange(3))
    buffer = torch.full((5,), -1)
    pair[1].to(0, 1).post(7, buffer).wait()
    assert buffer.tolist() == [0, 1, 2, -1, -1]


def test_a_rank_that_is_gone_is_a_closed_transport(pair):
    pair[0].close()
    waiting = pair[1].to(0, 1).post(1, torch.empty(2))
    with pytest.raises(RuntimeError, match="connection closed by peer: rank 0") as info:
        waiting.wait()
    assert isinstance(translate(info.value), TransportClosed)
    with pytest.raises(RuntimeError, match="connection closed by peer: rank 0"):
        for _ in range(2):
            pair[1].to(0, 1).send(1, torch.zeros(2))


def test_a_rank_that_sends_nothing_is_a_timeout(pair):
    with pytest.raises(RuntimeError, match="timed out waiting for rank 0") as info:
        pair[1].to(0, 1).post(1, torch.empty(2)).wait()
    assert isinstance(translate(info.value), TransportClosed)

"""Messages of at most a megabyte between CPU ranks of one host, over Unix sockets.

A message over gloo needs gloo's thread at both ends: that of the sender must read that the receive is posted before
the data leaves. While all cores compute, that thread waits for a core, up to a tick of the scheduler (4 ms), and the
receiver waits with it. Over a Unix socket, the sending rank writes the message and the receiving rank reads it, without
another thread.

Each pair of ranks of a host has one connection, whose messages carry the tag of their channel. A send never blocks:
what the socket does not take at once goes to a thread. A message that is read before its turn is kept.

The names of the sockets are random and abstract: they are in no folder, exist in one network namespace only, and end
with the process. Both ends check that the other one has the same user, and the connecting one shows the name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from autopipe.ir.messages import Channel
from autopipe.runtime.unix_sockets import is_same_user

_LARGEST_BYTES = 1 << 20  # of a message: gloo's thread receives larger ones while the rank computes

_HEADER = struct.Struct("=II")  # tag, bytes
_HELLO = struct.Struct("=I32s")  # rank, name of the listener
_TIME = struct.Struct("@ll")  # a timeval
_SEND_BUFFER = 1 << 21  # the kernel gives what it allows
_ACCEPT_SECONDS, _HELLO_SECONDS = 20.0, 1.0


def _host() -> str:
    """Return a name of this host, its network namespace and user: ranks with the same one can connect."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    facts = (boot, socket.gethostname(), str(Path("/proc/self/ns/net").readlink()), str(os.getuid()))
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


class Arrival:
    """A posted receive of a message, or of a part of one, into ``buffer``."""

    def __init__(self, connection: _Connection, buffer: memoryview) -> None:
        self.connection, self.buffer, self.complete = connection, buffer, False

    def room(self, size: int) -> memoryview:
        """Return the part of the buffer for a message of ``size`` bytes. Raises: RuntimeError if it is too small."""
        if size > len(self.buffer):
            raise RuntimeError(f"a message has {size} bytes, and its receiver expects at most {len(self.buffer)}")
        return self.buffer[:size]

    def wait(self) -> None:
        """Read messages until this one is there. Raises: RuntimeError if the other end is gone, or sends nothing."""
        while not self.complete:
            self.connection.read_one()


class _Connection:
    """The messages from and to one other rank."""

    def __init__(self, rank: int, other: socket.socket, timeout_seconds: float) -> None:
        self._rank, self._socket = rank, other
        other.settimeout(None)
        limit = _TIME.pack(int(timeout_seconds), int(timeout_seconds % 1 * 1e6))
        other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)  # of the thread
        other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._header = bytearray(_HEADER.size)
        self._posted: dict[int, deque[Arrival]] = {}
        self._early: dict[int, deque[bytearray]] = {}
        self._waiting: queue.SimpleQueue[list[memoryview] | None] = queue.SimpleQueue()
        self._num_waiting, self._lock = 0, threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def send(self, tag: int, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor, which is kept until it is sent. Raises: RuntimeError if the other end is gone."""
        data = _memory(tensor)
        if self._error is not None:
            raise self._gone(self._error)
        parts = [memoryview(_HEADER.pack(tag, len(data))), data]
        with self._lock:
            is_first = self._num_waiting == 0
        if is_first:
            try:
                sent = self._socket.sendmsg(parts, (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise self._gone(error) from error
            if sent == _HEADER.size + len(data):
                return
            parts = _after(parts, sent)
        with self._lock:
            self._num_waiting += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_waiting, name=f"to rank {self._rank}", daemon=True)
            self._thread.start()
        self._waiting.put(parts)

    def _send_waiting(self) -> None:
        while (parts := self._waiting.get()) is not None:
            try:
                for part in parts:
                    if self._error is None:
                        self._socket.sendall(part, socket.MSG_NOSIGNAL)
            except OSError as error:
                self._error = error
            parts = part = None  # type: ignore[assignment]  # free the tensor while the queue is empty
            with self._lock:
                self._num_waiting -= 1

    def post(self, tag: int, buffer: torch.Tensor) -> Arrival:
        """Post the receive of the next message with a tag, which may be shorter than the buffer."""
        arrival = Arrival(self, _memory(buffer))
        early = self._early.get(tag)
        if early:
            data = early.popleft()
            arrival.room(len(data))[:] = data
            arrival.complete = True
        else:
            self._posted.setdefault(tag, deque()).append(arrival)
        return arrival

    def read_one(self) -> None:
        """Read a message into the buffer that was posted for it, or keep it."""
        self._fill(memoryview(self._header))
        tag, size = _HEADER.unpack(self._header)
        posted = self._posted.get(tag)
        if posted:
            arrival = posted.popleft()
            self._fill(arrival.room(size))
            arrival.complete = True
            return
        data = bytearray(size)
        self._fill(memoryview(data))
        self._early.setdefault(tag, deque()).append(data)

    def _fill(self, buffer: memoryview) -> None:
        start = 0
        while start < len(buffer):
            try:
                count = self._socket.recv_into(buffer[start:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise RuntimeError(f"timed out waiting for rank {self._rank}") from None
            except OSError as error:
                raise self._gone(error) from error
            if count == 0:
                raise self._gone(None)
            start += count

    def _gone(self, error: OSError | None) -> RuntimeError:
        return RuntimeError(f"connection closed by peer: rank {self._rank}" + (f" ({error})" if error else ""))

    def drain(self) -> None:
        """Wait until everything is sent. Nothing can be sent afterwards. Raises: RuntimeError if it was not sent."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
        if self._error is not None:
            raise self._gone(self._error)

    def close(self) -> None:
        """Close the connection, also that of processes that were forked from this one."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _after(parts: Iterable[memoryview], sent: int) -> list[memoryview]:
    """Return what is left of some buffers after their first bytes."""
    left = []
    for part in parts:
        if sent < len(part):
            left.append(part[sent:])
        sent = max(0, sent - len(part))
    return left


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class Neighbours:
    """The connections of a rank to others of its host."""

    def __init__(self, connections: dict[int, _Connection]) -> None:
        self._connections = connections

    @classmethod
    def connect(cls, store: Any, rank: int, channels: Iterable[Channel], timeout_seconds: float) -> Neighbours:
        """Connect a rank to the other ranks of this host that share a channel with it. Every rank calls it.

        ``store``: torch's, in which the ranks exchange the names of their sockets; None: no connections. A pair of
        ranks that cannot connect uses gloo. Raises: RuntimeError of torch if a rank does not answer in the store.
        """
        pairs = [{channel.from_rank, channel.to_rank} for channel in channels]
        peers = sorted(set().union(*(pair for pair in pairs if rank in pair)) - {rank})
        if store is None or not peers:
            return cls({})
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            name = secrets.token_hex(16)
            try:
                host = _host()
                listener.bind(_address(name))
                listener.listen()
            except OSError:  # another system than Linux, or a sandbox: gloo carries everything
                host = ""
            store.set(_key(rank), f"{host} {name}")
            others = {peer: store.get(_key(peer)).decode().split(" ") for peer in peers}
            same = {peer: other for peer, (theirs, other) in others.items() if host and theirs == host}
            opened = {peer: _call(other, rank) for peer, other in same.items() if peer > rank}
            accepted = _accept(listener, name, {peer for peer in same if peer < rank})
        store.set(f"{_key(rank)}/accepted", " ".join(map(str, accepted)))
        sockets = dict(accepted)
        for peer, connected in opened.items():
            if connected is None:
                continue
            if str(rank) in store.get(f"{_key(peer)}/accepted").decode().split():
                sockets[peer] = connected
            else:
                connected.close()
        return cls({peer: _Connection(peer, other, timeout_seconds) for peer, other in sockets.items()})

    def to(self, rank: int, num_bytes: int) -> _Connection | None:
        """Return the connection for messages of a size to or from a rank; None if they travel over gloo."""
        return self._connections.get(rank) if num_bytes <= _LARGEST_BYTES else None

    def drain(self) -> None:
        """Wait until everything is sent. Raises: RuntimeError if it was not sent."""
        for connection in self._connections.values():
            connection.drain()

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            connection.close()


def _key(rank: int) -> str:
    return f"autopipe/neighbours/{rank}"


def _address(name: str) -> str:
    return f"\0autopipe-{name}"


def _call(name: str, rank: int) -> socket.socket | None:
    """Connect to the listener of a rank, and say which rank this is. None if that fails."""
    other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        other.connect(_address(name))
        if is_same_user(other):
            other.sendall(_HELLO.pack(rank, name.encode()))
            return other
    except OSError:
        pass
    other.close()
    return None


def _accept(listener: socket.socket, name: str, expected: set[int]) -> dict[int, socket.socket]:
    """Return the connections from the expected ranks, as far as they come in time."""
    accepted: dict[int, socket.socket] = {}
    end = time.monotonic() + _ACCEPT_SECONDS
    while expected - set(accepted) and (left := end - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            other, _ = listener.accept()
        except OSError:
            break
        with contextlib.suppress(OSError):
            other.settimeout(_HELLO_SECONDS)
            hello = other.recv(_HELLO.size, socket.MSG_WAITALL) if is_same_user(other) else b""
            if len(hello) == _HELLO.size:
                rank, shown = _HELLO.unpack(hello)
                if shown == name.encode() and rank in expected - set(accepted):
                    accepted[rank] = other
                    continue
        other.close()
    return accepted

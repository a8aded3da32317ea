"""The ranks of a run on several hosts, as a supervisor sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopipe.errors import ArtifactError
from autopipe.ir import decoding
from autopipe.ir.schedule import Instruction
from autopipe.launch.rank.forked import ForkedRanks
from autopipe.launch.rank.heartbeat import Beat
from autopipe.launch.remote import protocol
from autopipe.launch.remote.connections import Connections, Lost
from autopipe.workers.signals import StopRequest

# The fields of the events that ranks report. An event of another host is compared with them before it is used.


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The bytes that ``launch.rank.out_of_memory`` adds to an error."""

    predicted: int
    used: int
    requested: int
    available: int


@dataclass(frozen=True, slots=True)
class SpentSeconds:
    """What a rank spent its time on: see ``launch.rank.worker``."""

    computing: float
    waiting: float
    data: float
    saving: float
    recording: float
    ready: float
    cpu: float


_MEMORY = ("bytes", "held_bytes", "weight_bytes", "versions", "in_flight", "planned_bytes")
# kind -> field -> type, without ``kind`` and ``rank``
FIELDS: dict[str, dict[str, Any]] = {
    "ready": {"pid": int},
    "device": {"index": int, "others": int},
    "note": {"text": str},
    "complete-build": {"reason": str},
    "round": {"epoch": int, "minibatches": int},
    "other-data": {"epoch": int, "position": int, "replay": str, "digest": str},
    "step": {"step": int, "loss": float, "samples": int, "time": float},
    "nonfinite": {"step": int, "what": str, "place": int, "policy": str},
    "checkpoint": {"step": int, "path": str},
    "evaluating": {"step": int},
    "evaluation": {"step": int, "loss": float, "batches": int, "samples": int},
    "audit": {"step": int, "loss": float},
    "audit-left-out": {"reason": str},
    "audit-failed": {"step": int, "reason": str},
    "peak": {"stage": int, **dict.fromkeys(_MEMORY, int)},
    "copied": {"to_device": int, "to_host": int},
    "spent": {"seconds": SpentSeconds},
    "spans": {"spans": tuple[tuple[Instruction, float, float], ...]},
    "stopped": {"step": int},
    "done": {},
    "error": {
        **dict.fromkeys(("message", "where", "remedy", "instruction", "traceback"), str),
        **{"stage": int | None, "microbatch": int, "secondary": bool, "time_ns": int},
    },
    "exit": {"code": int | None, "time_ns": int},
}
# fields that an event of the kind may lack
OPTIONAL: dict[str, dict[str, Any]] = {
    "error": {"out_of_memory": OutOfMemory},
    "step": {"learning_rates": tuple[float, ...], "gradient_norm": float, "skipped": bool},
}


def problem(event: Mapping[str, Any]) -> str:
    """Return what is wrong with the fields of an event, "" if nothing is."""
    kind = event.get("kind")
    fields = FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        return f"{str(kind)[:40]!r} is not the kind of an event of a rank"
    optional = OPTIONAL.get(str(kind), {})
    for name in event:
        if name not in fields and name not in optional and name not in ("kind", "rank"):
            return f"{kind} has the unknown field {name[:40]!r}"
    for name, expected in {**fields, **optional}.items():
        if name in event:
            if not _fits(expected, event[name]):
                return f"{name!r} of {kind} is {str(event[name])[:40]!r}"
        elif name in fields:
            return f"{kind} lacks {name!r}"
    return ""


def _fits(expected: Any, value: Any) -> bool:
    if expected is str or (expected is float and isinstance(value, float)):
        return isinstance(value, expected)  # any text, and a loss that is not finite
    try:
        decoding.decode(expected, value, "")
    except ArtifactError:
        return False
    return True


class RemoteRanks:
    """The ranks on other hosts, reached through connections, and under a cluster's own launcher rank 0 of this host."""

    def __init__(
        self,
        connections: Connections,
        ranks_of: Sequence[Sequence[int]],
        hosts: Sequence[str],
        *,
        patience_seconds: float,
        attempt: int = 1,
        own: ForkedRanks | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        """Watch ranks that the hosts are starting.

        ``ranks_of``: the ranks of each connection. ``hosts``: the host of each rank. ``own``: this host's rank.
        ``stop``: is set if a host receives a signal that requests the end.
        """
        self.hosts, self.patience_seconds = hosts, patience_seconds
        self._connections, self._ranks_of = connections, ranks_of
        self._attempt, self._own, self._stop = attempt, own, stop
        self._beats = [Beat(0, time.monotonic(), False, "starting") for _ in hosts]
        self._unusual: dict[int, str] = {}
        self._wrote_stacks: set[int] = set()
        self._ended: set[int] = set()

    def poll(self, timeout: float) -> Iterator[Mapping[str, Any]]:
        """Return the events of the ranks and of lost hosts within ``timeout`` seconds."""
        received = self._connections.receive(timeout, self._own.waitable() if self._own is not None else ())
        for index, message in received:
            if isinstance(message, Lost):
                yield self._lost(index, message)
            else:
                yield from self._take(index, message)
        if self._own is not None:
            yield from map(protocol.in_wall_time, self._own.poll(0))

    def _lost(self, index: int, lost: Lost) -> Mapping[str, Any]:
        return {
            "kind": "lost",
            "host": self._connections.all[index].host,
            "ranks": tuple(self._ranks_of[index]),
            "message": lost.message,
            "remedy": lost.remedy,
            "time_ns": time.time_ns(),
        }

    def _take(self, index: int, message: protocol.Message) -> Iterator[Mapping[str, Any]]:
        """Handle a message; return the event in it, or None."""
        if getattr(message, "attempt", self._attempt) != self._attempt:
            return
        connection = self._connections.all[index]
        match message:
            case protocol.Beats():
                for beat in message.beats:
                    if beat.rank in self._ranks_of[index]:
                        self._beats[beat.rank] = beat.here()
            case protocol.Stacks():
                self._wrote_stacks.add(index)
                self._unusual |= dict(message.unusual)
            case protocol.Ended():
                self._ended.add(index)
            case protocol.Signaled():
                if self._stop is not None:
                    self._stop.ask(message.signal)
            case protocol.Event():
                event = message.event
                if event.get("rank") not in self._ranks_of[index]:
                    connection.drop("it sent an event of another rank")
                elif wrong := problem(event):
                    connection.drop(f"it sent a malformed event: {wrong}")
                else:
                    yield protocol.corrected(event, connection.offset_ns)

    def beats(self) -> Sequence[Beat]:
        """Return the last heartbeat of each rank."""
        if self._own is not None:
            self._beats[0] = self._own.beat(0)
        return self._beats

    def set_stop(self, before: int, agreed: bool) -> None:
        """Send every rank the minibatch before which it stops, and whether that is agreed."""
        if self._own is not None:
            self._own.set_stop(before, agreed)
        self._connections.send(protocol.Stop(before, agreed))

    def write_stacks(self) -> Mapping[int, str]:
        """Make every living rank write its stacks to its log; return unusual process states."""
        self._unusual = dict(self._own.write_stacks()) if self._own is not None else {}
        self._wrote_stacks.clear()
        self._connections.send(protocol.WriteStacks())
        self._receive_until(protocol.STACKS_SECONDS, lambda: self._wrote_stacks >= set(self._connections.present))
        return self._unusual

    def end(self) -> None:
        """End all ranks; return when none is left on a host that can be reached."""
        if self._own is not None:
            self._own.end()
            self._own = None
        self._ended.clear()
        self._connections.send(protocol.End())
        self._receive_until(protocol.END_SECONDS, lambda: self._ended >= set(self._connections.present))

    def _receive_until(self, seconds: float, done: Callable[[], bool]) -> None:
        """Handle messages for a time. Events are kept for the next ``poll``."""
        end = time.monotonic() + seconds
        kept = []
        while not done() and time.monotonic() < end:
            for index, message in self._connections.receive(max(end - time.monotonic(), 0.0)):
                if isinstance(message, (Lost, protocol.Event)):
                    kept.append((index, message))
                else:
                    list(self._take(index, message))
        for index, message in kept:
            self._connections.keep(index, message)

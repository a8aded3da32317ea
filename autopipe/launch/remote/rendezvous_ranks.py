"""The ranks of one attempt under a cluster's own launcher, as a supervisor sees them.

One is a child of this process, the others are children of the processes that report here; see
``launch.remote.rendezvous``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autopipe.ir import artifact
from autopipe.launch.rank.forked import ForkedRanks
from autopipe.launch.rank.heartbeat import Beat
from autopipe.launch.rank.signals import StopRequest
from autopipe.launch.remote.agent import in_wall_time
from autopipe.launch.remote.json_socket import Wire, WireError, ready_of
from autopipe.launch.request import WorkerSpec

END_SECONDS = 8.0
STACKS_SECONDS = 1.0
# a lost host is noticed within ten seconds, see launch.remote.json_socket
PATIENCE_SECONDS = 12.0


@dataclass(slots=True)
class Member:
    """The process of one other rank, as it introduced itself, and what it said last."""

    rank: int
    host: str
    local_rank: int
    local_world_size: int
    wire: Wire
    gone: bool = False
    ended: bool = True
    beat: Beat = field(default_factory=lambda: Beat(0, 0.0, False, ""))

    def leave(self) -> None:
        """Take note that the process is gone."""
        self.gone = self.ended = True
        self.wire.close()


class RendezvousRanks:
    """The ranks of one attempt, as a supervisor sees them: its own child, and what the other processes report."""

    patience_seconds = PATIENCE_SECONDS

    def __init__(self, members: Sequence[Member], scratch: Path, attempt: int, stop: StopRequest | None) -> None:
        self._attempt, self._stop = attempt, stop
        self._members = dict(enumerate(members, start=1))
        hosts = [socket.gethostname(), *(member.host for member in members)]
        # named only where there are several
        self.hosts: Sequence[str] = hosts if len(set(hosts)) > 1 else [""] * len(hosts)
        self._own = ForkedRanks(scratch, len(self.hosts), self.hosts)
        self._odd: dict[int, str] = {}
        self._lost: list[dict[str, Any]] = []

    def start_own(self, spec: WorkerSpec, listener: socket.socket) -> None:
        """Start rank 0."""
        self._own.start(replace(spec, heartbeats=str(self._own.heartbeats)), listener)

    def tell(self, member: Member, message: Mapping[str, Any]) -> None:
        """Send something to one process; where it is gone, that is an event."""
        if member.gone:
            return
        try:
            member.wire.send(message)
        except WireError as error:
            self._lose(member, str(error))

    def _lose(self, member: Member, why: str) -> None:
        member.leave()
        self._lost.append(
            {
                "kind": "lost",
                "host": member.host,
                "ranks": tuple(rank for rank, other in self._members.items() if other is member),
                "message": f"its process on {member.host} is gone ({why}): it was killed, or the host does not answer",
                "remedy": f"look at the launcher's output and at {member.host} (kernel log, memory, network)",
                "time_ns": time.time_ns(),
            }
        )

    def _present(self) -> list[Member]:
        return [member for member in self._members.values() if not member.gone]

    def poll(self, timeout: float) -> Iterator[Mapping[str, Any]]:
        """Return what the ranks say, and who has ended or was lost, within ``timeout`` seconds."""
        present = {member.wire: member for member in self._present()}
        ready = ready_of([*self._own.waitable(), *present], timeout)
        yield from map(in_wall_time, self._own.poll(0))
        for wire, member in present.items():
            if wire in ready:
                try:
                    messages = wire.receive()
                    for message in messages:
                        yield from self._take(member, message)
                except WireError as error:
                    self._lose(member, str(error))
                except (KeyError, TypeError, ValueError):
                    self._lose(member, "it said what is no message of ours")
        lost, self._lost = self._lost, []
        yield from lost

    def _take(self, member: Member, message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if message["attempt"] != self._attempt:
            return
        if message["kind"] == "beat":
            beat: Beat = artifact.decode(Beat, message["beat"], "beat")
            member.beat = replace(beat, seconds=time.monotonic() - message["age"])
        elif message["kind"] == "odd":
            self._odd |= {rank: str(message["what"]) for rank, other in self._members.items() if other is member}
        elif message["kind"] == "asked":
            if self._stop is not None:
                self._stop.ask(str(message["signal"]))
        elif message["kind"] == "ended":
            member.ended = True
        elif message["kind"] == "event":
            event = message["event"]
            if self._members.get(event["rank"]) is not member or not isinstance(event["kind"], str):
                raise ValueError("an event of another rank")
            yield event

    def beats(self) -> Sequence[Beat]:
        """Return what each rank noted last."""
        return [self._own.beats()[0], *(member.beat for member in self._members.values())]

    def set_stop(self, proposed: int, agreed: bool) -> None:
        """Let every rank know before which minibatch the run is to stop, and whether that is agreed."""
        self._own.set_stop(proposed, agreed)
        for member in self._present():
            self.tell(member, {"kind": "stop", "proposed": proposed, "agreed": agreed})

    def write_stacks(self) -> Mapping[int, str]:
        """Let every living rank write its stacks into its log; return what is odd about a rank."""
        self._odd = self._own.write_stacks()
        for member in self._present():
            self.tell(member, {"kind": "stacks"})
        self._hear_for(STACKS_SECONDS, lambda: False)
        return self._odd

    def end(self) -> None:
        """End all of them, and return when none is left or reachable."""
        self._own.end()
        for member in self._present():
            self.tell(member, {"kind": "end"})
        self._hear_for(END_SECONDS, lambda: all(member.ended for member in self._present()))

    def _hear_for(self, seconds: float, enough: Callable[[], bool]) -> None:
        """Take in what the processes say for a moment; events come too late to matter."""
        end = time.monotonic() + seconds
        while not enough() and time.monotonic() < end:
            wires = [member.wire for member in self._present()]
            if not wires:
                return
            ready = ready_of(wires, max(end - time.monotonic(), 0.0))
            for member in [member for member in self._present() if member.wire in ready]:
                try:
                    for message in member.wire.receive():
                        list(self._take(member, message))
                except (WireError, KeyError, TypeError, ValueError) as error:
                    self._lose(member, str(error))

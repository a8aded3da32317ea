"""The meeting: rank 0's process listens, and the process of every other rank reports to it.

::

    rank 0's process                            the process of rank r (launch.member)
      Meeting.gather   <--- hello --------------   who it is
                       ---- launch ------------>   starts its rank: a child process
      MeetingRanks     <--- event, beat --------   what its rank says and does
        (a supervisor  ---- stacks, end ------->
         watches them) ---- finished, failed -->   leaves with the same exit code and message

Each process is what a cluster's launcher started; ranks are its children, so that a rank that is killed has somebody to
say how. Rank 0 listens on one address only, and believes whoever connects, as torch's own store does: the network
between the hosts must be private.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from autopipe import __version__
from autopipe.errors import AutopipeError, RunError, counted
from autopipe.ir import artifact
from autopipe.launch import network
from autopipe.launch.agent import file_digest, in_wall_time
from autopipe.launch.environment import Membership
from autopipe.launch.forked import ForkedRanks
from autopipe.launch.heartbeat import Beat
from autopipe.launch.request import Launch, WorkerSpec
from autopipe.launch.signals import StopRequest
from autopipe.launch.wire import Wire, WireError

# how long processes may come after one another: pods and queues take their time
GATHER_SECONDS = 600.0
# a process that has connected says who it is at once
HELLO_SECONDS = 10.0
TELL_SECONDS = 3.0
END_SECONDS = 8.0
STACKS_SECONDS = 1.0
# a lost host is noticed within ten seconds, see launch.wire
PATIENCE_SECONDS = 12.0
INTERRUPTED = 130
_ONE_COMMAND = (
    "start every rank with the same autopipe and by the same command; two jobs on one host need different MASTER_PORTs"
)


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


def _introduced(wire: Wire) -> tuple[Member, str, int] | None:
    """Return who has connected, their version and their world size; None for a stranger."""
    try:
        (hello,) = wire.receive()
        numbers = [hello[name] for name in ("rank", "local_rank", "local_world_size", "world_size")]
        words = [hello[name] for name in ("kind", "host", "version")]
    except (WireError, ValueError, KeyError):
        return None
    if not all(type(n) is int for n in numbers) or not all(type(w) is str for w in words) or words[0] != "hello":
        return None
    rank, local_rank, local_world_size, world_size = numbers
    return Member(rank, words[1], local_rank, local_world_size, wire), words[2], world_size


class Meeting:
    """Rank 0's end, from before anything is prepared to after the last rank has left."""

    def __init__(self, here: Membership, listener: socket.socket | None) -> None:
        self.here = here
        self._listener = listener
        self._pending: dict[int, tuple[Wire, float]] = {}
        self._attempts = 0
        self.members: dict[int, Member] = {}

    # -- coming and going ----------------------------------------------------------------------------------------

    def gather(self, seconds: float = GATHER_SECONDS) -> None:
        """Wait until the process of every rank is here.

        Raises: RunError naming those that did not come, or one that does not fit the others.
        """
        end = time.monotonic() + seconds
        while len(self.members) < self.here.world_size - 1:
            self._admit(min(1.0, max(end - time.monotonic(), 0.0)))
            gone = [member for member in self.members.values() if member.gone]
            if gone:
                raise RunError(
                    f"the process of rank {gone[0].rank} on {gone[0].host} went away before training began",
                    remedy="read what it printed, in the launcher's output",
                )
            if time.monotonic() > end:
                missing = [rank for rank in range(1, self.here.world_size) if rank not in self.members]
                shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
                raise RunError(
                    f"{counted(len(missing), 'rank')} of {self.here.world_size} did not come to "
                    f"{self.here.address} port {self.here.port} within {seconds:.0f} s: {shown}",
                    remedy="check that every rank was started with the same MASTER_ADDR and MASTER_PORT and can reach "
                    "it, and that as many were started as the launcher says",
                )

    def _admit(self, timeout: float) -> None:
        """Take in who knocks, and hear who they are. A stranger is turned away and changes nothing."""
        assert self._listener is not None
        waiting: list[Any] = [self._listener, *(wire for wire, _ in self._pending.values())]
        waiting += [member.wire for member in self.members.values() if not member.gone]
        ready = set(wait(waiting, timeout))
        for member in self.members.values():
            if member.wire in ready:
                try:
                    member.wire.receive()  # nothing is due but its end
                except WireError:
                    member.leave()
        if self._listener in ready:
            with contextlib.suppress(OSError):
                wire = Wire(self._listener.accept()[0])
                self._pending[wire.fileno()] = wire, time.monotonic()
        for descriptor, (wire, since) in list(self._pending.items()):
            if wire in ready:
                del self._pending[descriptor]
                self._hear(wire)
            elif time.monotonic() - since > HELLO_SECONDS:
                del self._pending[descriptor]
                wire.close()

    def _hear(self, wire: Wire) -> None:
        found = _introduced(wire)
        if found is None:
            wire.close()
            return
        member, version, world_size = found
        ours, complaint = self.here.world_size, ""
        if version != __version__:
            complaint = f"{member.host} has autopipe {version}, and rank 0 has {__version__}"
        elif world_size != ours or not 0 < member.rank < ours:
            complaint = f"rank {member.rank} on {member.host} was told of {world_size} ranks, and rank 0 of {ours}"
        elif member.rank in self.members:
            complaint = f"rank {member.rank} came twice: from {self.members[member.rank].host} and from {member.host}"
        if complaint:
            with contextlib.suppress(WireError):
                wire.send({"kind": "failed", "what": complaint, "where": "", "remedy": _ONE_COMMAND, "code": 1})
            wire.close()
            raise RunError(complaint, remedy=_ONE_COMMAND)
        self.members[member.rank] = member

    def finish(self, code: int) -> None:
        """Let every process leave with an exit code, and return when they have; rank 0 is the last to go."""
        self._part({"kind": "finished", "code": code})

    def fail(self, error: BaseException) -> None:
        """Tell everyone what this process fails of, those too that are only just coming."""
        if isinstance(error, AutopipeError):
            said = {"what": error.what, "where": error.where, "remedy": error.remedy, "code": error.exit_code}
        elif isinstance(error, KeyboardInterrupt):
            said = {"what": "stopped by Ctrl-C", "where": "", "remedy": "", "code": INTERRUPTED}
        else:
            said = {"what": f"rank 0: {type(error).__name__}: {error}", "where": "", "remedy": "", "code": 1}
        end = time.monotonic() + TELL_SECONDS
        while len(self.members) < self.here.world_size - 1 and time.monotonic() < end:
            with contextlib.suppress(RunError):
                self._admit(0.2)
        self._part({"kind": "failed", **said})

    def _part(self, message: Mapping[str, Any]) -> None:
        present = [member for member in self.members.values() if not member.gone]
        for member in present:
            with contextlib.suppress(WireError):
                member.wire.send(message)
        end = time.monotonic() + TELL_SECONDS
        while present and time.monotonic() < end:
            for wire in wait([member.wire for member in present], max(end - time.monotonic(), 0.0)):
                try:
                    wire.receive()  # type: ignore[union-attr]  # only our own were waited for
                except WireError:
                    present = [member for member in present if member.wire is not wire]
        self.close()

    def close(self) -> None:
        """Hang up and listen no more."""
        for wire in [wire for wire, _ in self._pending.values()] + [m.wire for m in self.members.values()]:
            wire.close()
        if self._listener is not None:
            self._listener.close()

    # -- ranks ---------------------------------------------------------------------------------------------------

    def start(self, request: Launch, scratch: Path) -> MeetingRanks:
        """Start every rank: rank 0 here, the others by their own processes, as many as the run needs.

        Raises: RunError where too few processes are left.
        """
        if not self._attempts:
            self.gather()
        present = [member for _, member in sorted(self.members.items()) if not member.gone]
        if len(present) + 1 < request.world_size:
            raise RunError(
                f"{counted(request.world_size, 'rank')} cannot be started: {self.here.launcher} has "
                f"{counted(len(present) + 1, 'process')} left",
                remedy="start the run again with --resume; --elastic goes on with fewer ranks",
            )
        self._attempts += 1
        members = present[: request.world_size - 1]
        ranks = MeetingRanks(self, members, scratch, self._attempts, request.stop)
        listener = network.listen(self.address)
        job = request.run.path / "job.json"
        message = {
            "kind": "launch",
            "attempt": self._attempts,
            "job": str(job.resolve()),
            "digest": file_digest(job),
        }
        store = network.tcp_address(self.address, listener.getsockname()[1])
        try:
            for rank, member in enumerate(members, start=1):
                spec = _spec(request, store, rank, member.local_rank, member.local_world_size, member.host)
                ranks.tell(member, {**message, "spec": artifact.encode(spec)})
                member.ended, member.beat = member.gone, Beat(0, time.monotonic(), False, "starting")
            ranks.start_own(_spec(request, store, 0, self.here.local_rank, self.here.local_world_size), listener)
        except BaseException:
            ranks.end()
            raise
        finally:
            listener.close()
        return ranks

    @property
    def address(self) -> str:
        """Where rank 0 listens."""
        return "127.0.0.1" if self._listener is None else str(self._listener.getsockname()[0])


def _spec(request: Launch, store: str, rank: int, local_rank: int, local_world_size: int, host: str = "") -> WorkerSpec:
    return WorkerSpec(
        run=str(request.run.path.resolve()),
        rank=rank,
        world_size=request.world_size,
        store=store,
        heartbeats="",
        body=request.body,
        timeout_seconds=request.timeout_seconds,
        batch_size=request.batch_size,
        evaluation_data=request.evaluation_data,
        interface=request.settings.interface,
        host=host,
        local_rank=local_rank,
        local_world_size=local_world_size,
    )


class MeetingRanks:
    """The ranks of one attempt, as a supervisor sees them: its own child, and what the other processes report."""

    patience_seconds = PATIENCE_SECONDS

    def __init__(
        self, meeting: Meeting, members: Sequence[Member], scratch: Path, attempt: int, stop: StopRequest | None
    ) -> None:
        self._meeting, self._attempt, self._stop = meeting, attempt, stop
        self._members = dict(enumerate(members, start=1))
        self.hosts: Sequence[str] = ["", *(member.host for member in members)]
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
        ready = set(wait([*self._own.waitable(), *present], timeout))
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
                self._stop.asked = self._stop.asked or str(message["signal"])
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

    def _hear_for(self, seconds: float, enough: Any) -> None:
        """Take in what the processes say for a moment; events come too late to matter."""
        end = time.monotonic() + seconds
        while not enough() and time.monotonic() < end:
            wires = [member.wire for member in self._present()]
            if not wires:
                return
            ready: Iterable[Any] = wait(wires, max(end - time.monotonic(), 0.0))
            for member in [member for member in self._present() if member.wire in set(ready)]:
                try:
                    for message in member.wire.receive():
                        list(self._take(member, message))
                except (WireError, KeyError, TypeError, ValueError) as error:
                    self._lose(member, str(error))

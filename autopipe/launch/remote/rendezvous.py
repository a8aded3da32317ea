"""The rendezvous: rank 0's process listens, and the process of every other rank reports to it.

::

    rank 0's process                            the process of rank r (launch.remote.peer)
      Rendezvous.gather   <--- hello --------------   who it is
                       ---- launch ------------>   starts its rank: a child process
      RendezvousRanks     <--- event, beat --------   what its rank says and does
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopipe import __version__
from autopipe.errors import AutopipeError, RunError, counted
from autopipe.ir import artifact
from autopipe.launch.rank.heartbeat import Beat
from autopipe.launch.remote import network
from autopipe.launch.remote.agent import file_digest
from autopipe.launch.remote.identity import RankIdentity
from autopipe.launch.remote.json_socket import Wire, WireError, ready_of
from autopipe.launch.remote.rendezvous_ranks import Member, RendezvousRanks
from autopipe.launch.request import LaunchRequest, WorkerSpec

# how long processes may come after one another: pods and queues take their time
GATHER_SECONDS = 600.0
# a process that has connected says who it is at once
HELLO_SECONDS = 10.0
TELL_SECONDS = 3.0
# how long rank 0, once it has failed, waits to tell those that have not come yet
LATE_SECONDS = 10.0
INTERRUPTED = 130
_ONE_COMMAND = (
    "start every rank with the same autopipe and by the same command; two jobs on one host need different MASTER_PORTs"
)


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


class Rendezvous:
    """Rank 0's end, from before anything is prepared to after the last rank has left. ``address``: where it listens."""

    def __init__(self, here: RankIdentity, listener: socket.socket | None) -> None:
        self.here = here
        self.address = "127.0.0.1" if listener is None else str(listener.getsockname()[0])
        self._listener = listener
        self._pending: dict[int, tuple[Wire, float]] = {}
        self._attempts = 0
        self.members: dict[int, Member] = {}

    # -- coming and going ----------------------------------------------------------------------------------------

    def gather(self, seconds: float = GATHER_SECONDS) -> None:
        """Wait until the process of every rank is here, and listen no more.

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
        self._stop_listening()

    def _admit(self, timeout: float) -> None:
        """Take in who knocks, and hear who they are. A stranger is turned away and changes nothing."""
        assert self._listener is not None
        waiting: list[Any] = [self._listener, *(wire for wire, _ in self._pending.values())]
        waiting += [member.wire for member in self.members.values() if not member.gone]
        ready = ready_of(waiting, timeout)
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
        present = self._tell({"kind": "finished", "code": code})
        end = time.monotonic() + TELL_SECONDS
        while present and time.monotonic() < end:
            for wire in ready_of([member.wire for member in present], max(end - time.monotonic(), 0.0)):
                try:
                    wire.receive()
                except WireError:
                    present = [member for member in present if member.wire is not wire]
        self.close()

    def fail(self, error: BaseException) -> None:
        """Tell everyone what this process fails of, those too that are only just coming.

        They leave once this process has ended: where a launcher takes the first exit code, or then ends the others,
        it is rank 0's that counts, and rank 0 has spoken.
        """
        if isinstance(error, AutopipeError):
            said = {"what": error.what, "where": error.where, "remedy": error.remedy, "code": error.exit_code}
        elif isinstance(error, KeyboardInterrupt):
            said = {"what": "stopped by Ctrl-C", "where": "", "remedy": "", "code": INTERRUPTED}
        else:
            said = {"what": f"rank 0: {type(error).__name__}: {error}", "where": "", "remedy": "", "code": 1}
        end = time.monotonic() + LATE_SECONDS
        while len(self.members) < self.here.world_size - 1 and time.monotonic() < end:
            with contextlib.suppress(RunError):
                self._admit(0.2)
        for member in self._tell({"kind": "failed", **said}):
            member.wire.hold()
        self.close()

    def _tell(self, message: Mapping[str, Any]) -> list[Member]:
        """Send something to every process that is there, and return those."""
        present = [member for member in self.members.values() if not member.gone]
        for member in present:
            with contextlib.suppress(WireError):
                member.wire.send(message)
        return present

    def close(self) -> None:
        """Hang up and listen no more."""
        for member in self.members.values():
            member.wire.close()
        self._stop_listening()

    def _stop_listening(self) -> None:
        """Let nobody else in."""
        for wire, _ in self._pending.values():
            wire.close()
        self._pending.clear()
        if self._listener is not None:
            self._listener.close()

    # -- ranks ---------------------------------------------------------------------------------------------------

    def start(self, request: LaunchRequest, scratch: Path) -> RendezvousRanks:
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
                remedy="start the run again with --resume; it may have fewer ranks",
            )
        self._attempts += 1
        members = present[: request.world_size - 1]
        ranks = RendezvousRanks(members, scratch, self._attempts, request.stop)
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


def _spec(
    request: LaunchRequest, store: str, rank: int, local_rank: int, local_world_size: int, host: str = ""
) -> WorkerSpec:
    return request.worker_spec(
        rank,
        store=store,
        interface=request.settings.interface,
        host=host,
        local_rank=local_rank,
        local_world_size=local_world_size,
    )

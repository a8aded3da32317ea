"""The rendezvous under a cluster's own launcher: rank 0's process listens, and every other rank's process connects.

::

    rank 0's process                            the process of rank r (launch.remote.peer)
      Rendezvous.gather <--- Hello -------------   introduces itself
                        ---- Start ------------>   starts its rank: a child process
      RemoteRanks       <--- Event, Beats ------   reports what its rank does
        (a supervisor   ---- Stop, End, ... --->
         watches them)  ---- Finish, Fail ----->   exits with the same code and message

The cluster's launcher started each process. The ranks are their children, so that a process is left to report how a
rank was killed. Rank 0 listens on one address only and trusts every connection, as torch's own store does: the network
between the hosts must be private.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import replace
from pathlib import Path

from autopipe import __version__
from autopipe.errors import RunError, counted
from autopipe.launch.rank.forked import ForkedRanks
from autopipe.launch.remote import network, protocol
from autopipe.launch.remote.connections import Connections, Peer
from autopipe.launch.remote.rank_environment import RankIdentity
from autopipe.launch.remote.rank_host import file_digest
from autopipe.launch.remote.remote_ranks import RemoteRanks
from autopipe.launch.remote.stream import MessageStream, StreamError, wait_readable
from autopipe.launch.request import LaunchRequest, WorkerSpec
from autopipe.workers.signals import StopRequest

# how long rank 0 waits for the other processes to exit
LEAVE_SECONDS = 3.0
# how long rank 0, after a failure, waits for processes that have not connected yet
LATE_SECONDS = 10.0
INTERRUPTED_SECONDS = 1.0  # after an interrupt
# the kernel detects a lost host within ten seconds; see launch.remote.stream
PATIENCE_SECONDS = 12.0
_OTHER_DESCRIPTORS = 256  # of rank 0's process, besides one for each other process
_ONE_COMMAND = (
    "start every rank with the same autopipe and by the same command; two jobs on one host need different MASTER_PORTs"
)


class Member(Peer):
    """The connection to the process of one other rank."""

    def __init__(self, hello: protocol.Hello, stream: MessageStream) -> None:
        """Take over the stream of a process that has introduced itself."""
        super().__init__(hello.host, stream)
        self.hello = hello


def _introduced(stream: MessageStream) -> Member | None:
    """Return the process that has connected, None for a stranger."""
    try:
        (message,) = stream.receive()
    except (StreamError, ValueError):
        return None
    return Member(message, stream) if isinstance(message, protocol.Hello) else None


class Rendezvous:
    """Rank 0's side, from before the run is prepared until the last rank has left."""

    def __init__(self, identity: RankIdentity, listener: socket.socket | None) -> None:
        """Accept connections on a listening socket; None if rank 0 is the only rank."""
        self.identity = identity
        self.address = "127.0.0.1" if listener is None else str(listener.getsockname()[0])
        self.peers: dict[int, Member] = {}  # by rank
        self._listener = listener
        self._pending: dict[int, tuple[MessageStream, float]] = {}  # by descriptor: not introduced yet; since when
        self._attempts = 0

    # -- connecting and leaving --------------------------------------------------------------------------------------

    def gather(self, seconds: float = protocol.GATHER_SECONDS, stop: StopRequest | None = None) -> None:
        """Wait until the process of every rank has connected, then stop listening.

        Raises: RunError naming the ranks that did not connect, or one that does not fit the others; KeyboardInterrupt
        if ``stop`` requests the end: there is nothing to save yet.
        """
        end = time.monotonic() + seconds
        world_size = self.identity.world_size
        while len(self.peers) < world_size - 1:
            self._admit(min(1.0, max(end - time.monotonic(), 0.0)))
            if stop is not None and stop.signal_name:
                raise KeyboardInterrupt
            gone = [(rank, peer) for rank, peer in self.peers.items() if peer.lost()]
            if gone:
                raise RunError(
                    f"the process of rank {gone[0][0]} on {gone[0][1].host} disconnected before training began",
                    remedy="read what it printed, in the launcher's output",
                )
            if time.monotonic() > end:
                missing = [rank for rank in range(1, world_size) if rank not in self.peers]
                shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
                raise RunError(
                    f"{counted(len(missing), 'rank')} of {world_size} did not connect to "
                    f"{self.identity.address} port {self.identity.port} within {seconds:.0f} s: {shown}",
                    remedy="check that every rank was started with the same MASTER_ADDR and MASTER_PORT and can reach "
                    "it, and that the launcher started as many as it announced",
                )
        self._stop_listening()

    def _admit(self, timeout: float) -> None:
        """Accept connections and read their introductions. A stranger is disconnected and has no effect."""
        assert self._listener is not None
        present = [peer for peer in self.peers.values() if not peer.lost()]
        streams = [stream for stream, _ in self._pending.values()]
        streams += [stream for peer in present for stream in peer.readable()]
        ready = wait_readable([self._listener, *streams], timeout)
        for peer in present:
            if ready.intersection(peer.readable()):
                peer.receive()  # nothing but the end of the stream is due
        if self._listener in ready:
            self._accept()
        for descriptor, (stream, since) in list(self._pending.items()):
            if stream in ready:
                del self._pending[descriptor]
                self._introduce(stream)
            elif time.monotonic() - since > protocol.HELLO_SECONDS:
                del self._pending[descriptor]
                stream.close()

    def _accept(self) -> None:
        """Accept all connections that wait."""
        assert self._listener is not None
        self._listener.setblocking(False)
        network.allow_descriptors(self.identity.world_size + _OTHER_DESCRIPTORS)
        with contextlib.suppress(OSError):
            while True:
                stream = MessageStream.over(self._listener.accept()[0])
                self._pending[stream.fileno()] = stream, time.monotonic()

    def _introduce(self, stream: MessageStream) -> None:
        peer = _introduced(stream)
        if peer is None:
            stream.close()
            return
        hello, world_size, mismatch = peer.hello, self.identity.world_size, ""
        if hello.version != __version__:
            mismatch = f"{peer.host} has autopipe {hello.version}, and rank 0 has {__version__}"
        elif hello.world_size != world_size or not 0 < hello.rank < world_size:
            mismatch = (
                f"rank {hello.rank} on {peer.host} was started as one of {hello.world_size} ranks, and rank 0 as one "
                f"of {world_size}"
            )
        elif hello.rank in self.peers:
            mismatch = f"rank {hello.rank} connected twice: from {self.peers[hello.rank].host} and from {peer.host}"
        if mismatch:
            peer.send(protocol.Fail(mismatch, "", _ONE_COMMAND, 1))
            peer.close()
            raise RunError(mismatch, remedy=_ONE_COMMAND)
        self.peers[hello.rank] = peer

    def finish(self, code: int) -> None:
        """Make every process exit with a code, and return when they have: rank 0 leaves last."""
        connections = Connections(list(self.peers.values()))
        connections.send(protocol.Finish(code))
        end = time.monotonic() + LEAVE_SECONDS
        while connections.present and time.monotonic() < end:
            list(connections.receive(max(end - time.monotonic(), 0.0)))
        self.close()

    def fail(self, error: BaseException) -> None:
        """Send an exception of this process to all others, including those that connect late.

        They exit after this process. If a launcher takes the first exit code, or then kills the others, the code and
        the message are those of rank 0.
        """
        end = time.monotonic() + (INTERRUPTED_SECONDS if isinstance(error, KeyboardInterrupt) else LATE_SECONDS)
        while len(self.peers) < self.identity.world_size - 1 and time.monotonic() < end:
            with contextlib.suppress(RunError):
                self._admit(0.2)
        for peer in self.peers.values():
            peer.send(protocol.Fail.of(error))
            peer.hold()
        self.close()

    def close(self) -> None:
        """Close all connections and stop listening."""
        for peer in self.peers.values():
            peer.close()
        self._stop_listening()

    def _stop_listening(self) -> None:
        for stream, _ in self._pending.values():
            stream.close()
        self._pending.clear()
        if self._listener is not None:
            self._listener.close()

    # -- ranks -------------------------------------------------------------------------------------------------------

    def start(self, request: LaunchRequest, scratch: Path) -> RemoteRanks:
        """Start the ranks of the run: rank 0 here, the others in their own processes.

        Raises: RunError if too few processes are left.
        """
        if not self._attempts:
            self.gather(stop=request.stop)
        present = [peer for _, peer in sorted(self.peers.items()) if not peer.lost()]
        if len(present) + 1 < request.world_size:
            raise RunError(
                f"{counted(request.world_size, 'rank')} cannot be started: {self.identity.launcher} has "
                f"{counted(len(present) + 1, 'process')} left",
                remedy="start the run again with --resume; it may have fewer ranks",
            )
        self._attempts += 1
        peers = present[: request.world_size - 1]
        names = [socket.gethostname(), *(peer.host for peer in peers)]
        hosts = names if len(set(names)) > 1 else [""] * len(names)  # named only if there are several
        own = ForkedRanks(scratch, len(hosts), hosts)
        ranks = RemoteRanks(
            Connections(peers),
            [(rank,) for rank in range(1, len(hosts))],
            hosts,
            patience_seconds=PATIENCE_SECONDS,
            attempt=self._attempts,
            own=own,
            stop=request.stop,
        )
        listener = network.listen(self.address)
        store = network.tcp_address(self.address, listener.getsockname()[1])
        job = request.run.path / "job.json"
        digest = file_digest(job)
        try:
            for rank, peer in enumerate(peers, start=1):
                spec = _spec(request, store, rank, peer.hello.local_rank, peer.hello.local_world_size, peer.host)
                peer.send(protocol.Start(self._attempts, (spec,), str(job.resolve()), digest))
            spec = _spec(request, store, 0, self.identity.local_rank, self.identity.local_world_size)
            own.start(replace(spec, heartbeats=str(own.heartbeats)), listener)
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

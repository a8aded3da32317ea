"""The process of a rank other than 0, under a cluster's own launcher: it starts its rank on rank 0's request.

It prints nothing and decides nothing. It forwards the events of its rank to rank 0, and receives the error that ends
the run, so that every process ends with the same message. If rank 0 itself is gone, the message says so.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopipe import __version__
from autopipe.errors import RunError
from autopipe.launch.remote import protocol
from autopipe.launch.remote.rank_environment import RankIdentity
from autopipe.launch.remote.rank_host import RankHost
from autopipe.launch.remote.stream import MessageStream, StreamError, wait_readable
from autopipe.workers.fork_server import preload
from autopipe.workers.signals import ENDING, STOPPING, ignore_stop_signals

RETRY_SECONDS = 0.2
LEAVE_SECONDS = 5.0


def connect(host: str, port: int, seconds: float = protocol.GATHER_SECONDS) -> MessageStream:
    """Return messages to and from rank 0's process. Raises: RunError as ``connected``."""
    return MessageStream.over(connected(host, port, seconds))


def connected(host: str, port: int, seconds: float = protocol.GATHER_SECONDS) -> socket.socket:
    """Connect to rank 0's process, which may not listen yet.

    Raises: RunError if no process listens there within ``seconds``.
    """
    end = time.monotonic() + seconds
    reason = "timed out"
    while time.monotonic() < end:
        try:
            return socket.create_connection((host, port), timeout=10.0)
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(RETRY_SECONDS)
    raise RunError(
        f"rank 0 does not answer at {host} port {port}: {reason}",
        where=socket.gethostname(),
        remedy="check that rank 0 was started, that MASTER_ADDR is an address of its host that this host can reach, "
        "and that no firewall closes MASTER_PORT",
    )


def follow(identity: RankIdentity, stream: MessageStream) -> int:
    """Do what rank 0's process requests until the run ends, and return the exit code.

    Raises: RunError with the message of the first failure on any rank; KeyboardInterrupt if rank 0 was interrupted.
    """
    signals: list[str] = []
    with tempfile.TemporaryDirectory(prefix="autopipe-") as scratch, _signals_left_to_rank_0(signals):
        preload()  # imports torch while rank 0 prepares the run
        host = RankHost(Path(scratch), stream.send)
        try:
            return _serve(identity, stream, host, signals)
        except StreamError as error:
            raise RunError(
                f"the process of rank 0 is gone ({error}): it was killed, or its host does not answer",
                where=f"rank {identity.rank} on {socket.gethostname()}",
                remedy="read the launcher's output, and that of rank 0",
            ) from None
        finally:
            host.end()
            stream.close()


def _serve(identity: RankIdentity, stream: MessageStream, host: RankHost, signals: list[str]) -> int:
    stream.send(
        protocol.Hello(
            version=__version__,
            rank=identity.rank,
            world_size=identity.world_size,
            local_rank=identity.local_rank,
            local_world_size=identity.local_world_size,
            host=socket.gethostname(),
        )
    )
    beaten = 0.0
    while True:
        ready = wait_readable([stream, *host.waitable()], protocol.BEAT_SECONDS)
        host.report()
        if time.monotonic() - beaten >= protocol.BEAT_SECONDS and host.waitable():
            beaten = time.monotonic()
            host.send_beats(now=False)
        while signals:
            name = signals.pop(0)
            if not host.attempt:  # nothing runs yet that rank 0 would have to stop
                raise KeyboardInterrupt
            if signal.Signals[name] in ENDING:
                stream.send(protocol.Signaled(host.attempt, name))
        for message in stream.receive() if stream in ready else ():
            if isinstance(message, protocol.Finish):
                return message.code
            if isinstance(message, protocol.Fail):
                host.end()
                _await_end(stream)
                raise message.error()
            host.handle(message)


def _await_end(stream: MessageStream) -> None:
    """Return when rank 0's process has ended, or after a few seconds."""
    end = time.monotonic() + LEAVE_SECONDS
    with contextlib.suppress(StreamError):
        while (left := end - time.monotonic()) > 0:
            if wait_readable([stream], left):
                stream.receive()


@contextlib.contextmanager
def _signals_left_to_rank_0(received: list[str]) -> Iterator[None]:
    """Keep the signals that request the end of the run from ending this process: rank 0 handles them for all.

    SIGTERM and SIGHUP may have been sent to this host alone, so rank 0 gets a message. Ctrl-C and USR1 reach every
    process. Before its rank starts, each of them ends this process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def record(number: int, frame: Any) -> None:
        received.append(signal.Signals(number).name)

    previous = {number: signal.signal(number, record) for number in STOPPING}
    try:
        yield
    except BaseException:
        ignore_stop_signals()
        raise
    for number, handler in previous.items():
        signal.signal(number, handler)

"""A process that starts ranks of this host at the request of a watcher elsewhere, and reports what they do.

It prints nothing and decides nothing. Under a cluster's own launcher it is the process of a rank other than 0: it
connects to rank 0's, and receives the error that ends the run, so that every process ends with the same message. If
rank 0 itself is gone, the message says so. ``python -m autopipe.launch.remote.peer`` is what ssh starts, once a host:
stdin and stdout are its connection, and it ends with them.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from autopipe import __version__
from autopipe.errors import RunError
from autopipe.launch.remote import protocol
from autopipe.launch.remote.answers import answer
from autopipe.launch.remote.rank_environment import RankIdentity
from autopipe.launch.remote.rank_host import RankHost
from autopipe.launch.remote.stream import MessageStream, StreamError, take_stdin_and_stdout, wait_readable
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
    hello = protocol.Hello(
        version=__version__,
        rank=identity.rank,
        world_size=identity.world_size,
        local_rank=identity.local_rank,
        local_world_size=identity.local_world_size,
        host=socket.gethostname(),
    )
    try:
        return _serve(stream, hello)
    except StreamError as error:
        raise RunError(
            f"the process of rank 0 is gone ({error}): it was killed, or its host does not answer",
            where=f"rank {identity.rank} on {socket.gethostname()}",
            remedy="read the launcher's output, and that of rank 0",
        ) from None


def _serve(stream: MessageStream, hello: protocol.Hello | None = None, silence_seconds: float = math.inf) -> int:
    """Do what the watcher requests until it says that the run ends, and return the exit code. No rank is left.

    ``hello``: introduces this process first. ``silence_seconds``: without a message for so long, the watcher is lost.

    Raises: StreamError if the watcher is lost; and as ``follow``.
    """
    signals: list[str] = []
    with tempfile.TemporaryDirectory(prefix="autopipe-") as scratch, _signals_left_to_watcher(signals):
        host = RankHost(Path(scratch), stream.send)
        try:
            if hello is not None:
                preload()  # imports torch while rank 0 prepares the run
                stream.send(hello)
            return _loop(stream, host, signals, silence_seconds)
        finally:
            host.end()
            stream.close()


def _loop(stream: MessageStream, host: RankHost, signals: list[str], silence_seconds: float) -> int:
    heard, beaten = time.monotonic(), 0.0
    while True:
        ready = wait_readable([stream, *host.waitable()], protocol.BEAT_SECONDS)
        host.report()
        if time.monotonic() - beaten >= protocol.BEAT_SECONDS and host.has_ranks:
            beaten = time.monotonic()
            host.send_beats(now=False)
        while signals:
            name = signals.pop(0)
            if not host.attempt:  # nothing runs yet that the watcher would have to stop
                raise KeyboardInterrupt
            if signal.Signals[name] in ENDING:
                stream.send(protocol.Signaled(host.attempt, name))
        if stream in ready:
            heard = time.monotonic()
        elif time.monotonic() - heard > silence_seconds:
            raise StreamError("nothing was heard")
        for message in stream.receive() if stream in ready else ():
            match message:
                case protocol.Finish():
                    return message.code
                case protocol.Fail():
                    host.end()
                    _await_end(stream)
                    raise message.error()
                case protocol.Ask():
                    stream.send(answer(message, host))
                case _:
                    host.handle(message)


def _await_end(stream: MessageStream) -> None:
    """Return when rank 0's process has ended, or after a few seconds."""
    end = time.monotonic() + LEAVE_SECONDS
    with contextlib.suppress(StreamError):
        while (left := end - time.monotonic()) > 0:
            if wait_readable([stream], left):
                stream.receive()


@contextlib.contextmanager
def _signals_left_to_watcher(received: list[str]) -> Iterator[None]:
    """Keep the signals that request the end of the run from ending this process: the watcher handles them for all.

    SIGTERM and SIGHUP may have been sent to this host alone, so the watcher gets a message. Ctrl-C and USR1 reach every
    process of a cluster's launcher. Before its rank starts, each of them ends this process.
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


def main() -> None:
    """Run ranks for the process whose ssh started this one, until either is gone."""
    source, sink = take_stdin_and_stdout()
    stream = MessageStream(os.fdopen(source, "rb", buffering=0), os.fdopen(sink, "wb", buffering=0))
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    threading.Thread(target=_interrupt_after, args=(source,), daemon=True).start()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            _serve(stream, silence_seconds=protocol.SILENCE_SECONDS)
    except StreamError as error:
        raise SystemExit(f"the command that started this process is lost: {error}") from None
    finally:
        # the fork server may be importing torch, and would notice the end only later
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()


def _interrupt_after(source: int) -> None:
    """Interrupt the main thread some time after a pipe has ended, and end this process if that does not help.

    The main thread may be waiting for the fork server to import torch.
    """
    ended = select.poll()
    ended.register(source, select.POLLHUP | getattr(select, "POLLRDHUP", 0))
    ended.poll()
    time.sleep(LEAVE_SECONDS)
    os.kill(os.getpid(), signal.SIGALRM)
    time.sleep(LEAVE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()

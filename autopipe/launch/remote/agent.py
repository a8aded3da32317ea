"""The agent: ``python -m autopipe.launch.remote.agent``, started on a host by ssh, runs the ranks of that host.

It reads messages on stdin and answers on stdout; it does not open a port. When stdin ends or stays silent, the
agent ends its ranks and itself, so that a host that was cut off does not compute on alone. Its ranks die with it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

import psutil

from autopipe.errors import AutopipeError
from autopipe.launch.remote import host_description, network, protocol
from autopipe.launch.remote.rank_host import RankHost, file_digest
from autopipe.launch.remote.stream import MessageStream, StreamError, wait_readable
from autopipe.workers.fork_server import preload

# how long ranks may take to end before the agent exits without them; its exit kills them
LEAVE_SECONDS = 3.0


class Agent:
    """The agent of one host. Threads read, send heartbeats and watch for silence, however long a rank's start takes."""

    def __init__(self, stream: MessageStream) -> None:
        self._stream = stream
        self._requests: queue.SimpleQueue[protocol.Message] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        self._sending = threading.Lock()
        self._heard = time.monotonic()
        self._scratch = Path(tempfile.mkdtemp(prefix="autopipe-agent-"))
        self._host = RankHost(self._scratch, self._send)
        self._listener: socket.socket | None = None
        self._probes: list[socket.socket] = []

    def serve(self) -> None:
        """Handle messages until one requests the end, or the watcher is lost."""
        for task in (self._read, self._beat, self._watch_for_silence):
            threading.Thread(target=task, daemon=True).start()
        try:
            while self._turn():
                pass
        finally:
            self._host.end()
            self._clear()

    def _turn(self) -> bool:
        """Wait for something to do, and do it. Returns: whether to continue."""
        wait_readable([self._woken, *self._host.waitable()])
        self._host.report()
        if wait_readable([self._woken], 0):
            os.read(self._woken, 4096)
        while not self._requests.empty():
            message = self._requests.get()
            try:
                self._handle(message)
            except (AutopipeError, OSError) as error:
                fields = (error.what, error.where, error.remedy) if isinstance(error, AutopipeError) else None
                self._send(protocol.Refused(*(fields or (str(error), "", ""))))
            if isinstance(message, protocol.End):
                return False
        return True

    # -- threads -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        with contextlib.suppress(StreamError):
            while wait_readable([self._stream]):
                messages = self._stream.receive()
                self._heard = time.monotonic()
                for message in messages:
                    if not isinstance(message, protocol.KeepAlive):
                        self._enqueue(message)
        self._leave()

    def _beat(self) -> None:
        while True:
            self._host.send_beats(now=False)
            time.sleep(protocol.BEAT_SECONDS)

    def _watch_for_silence(self) -> None:
        """Leave if nothing arrives. Runs in a separate thread, because sending blocks while the connection is cut."""
        while time.monotonic() - self._heard < protocol.SILENCE_SECONDS:
            time.sleep(protocol.BEAT_SECONDS)
        self._leave()

    def _leave(self) -> None:
        """End the ranks and exit, even if the ranks do not end in time."""
        self._enqueue(protocol.End())
        time.sleep(LEAVE_SECONDS)
        self._clear()
        os._exit(1)

    def _clear(self) -> None:
        """Kill all child processes: the fork server may be importing torch, and would notice the end only later."""
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _enqueue(self, message: protocol.Message) -> None:
        self._requests.put(message)
        os.write(self._wake, b".")

    def _send(self, message: protocol.Message) -> None:
        with self._sending, contextlib.suppress(StreamError):  # the watcher is gone, and stdin ends too
            self._stream.send(message)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _handle(self, message: protocol.Message) -> None:
        answer = self._answer(message)
        if answer is not None:
            self._send(answer)
        else:
            self._host.handle(message, self._listener)
        if isinstance(message, protocol.Start):
            for used in (*self._probes, *([self._listener] if self._listener is not None else [])):
                used.close()

    def _answer(self, message: protocol.Message) -> protocol.Message | None:
        """Return the answer to a question, None for a message that concerns ranks."""
        match message:
            case protocol.Prepare():
                return self._prepare(message)
            case protocol.ReadClock():
                return protocol.Clock(message.id, time.time_ns())
            case protocol.Digest():
                return protocol.Digests({path: file_digest(Path(path)) for path in message.paths})
            case protocol.FindAddress():
                if message.interface:
                    address = network.address_of(message.interface)
                else:
                    address = network.own_address_towards(message.towards)
                return protocol.Address(address, network.interface_of(address))
            case protocol.Listen():
                self._listener = network.listen(message.address)
                return protocol.Listening(message.address, self._listener.getsockname()[1])
            case protocol.Probe():
                self._probes.append(network.listen(message.address))
                return protocol.Probing(self._probes[-1].getsockname()[1])
            case protocol.Reach():
                tried = ((name, network.reach(host, port, message.seconds)) for name, host, port in message.targets)
                return protocol.Reached(tuple((name, why) for name, why in tried if why))
        return None

    def _prepare(self, message: protocol.Prepare) -> protocol.Prepared:
        os.environ.update(message.environment)
        folder = Path(message.cwd)
        if folder.is_dir():
            os.chdir(folder)
        preload()  # imports torch during the remaining questions
        return protocol.Prepared(host_description.collect(devices=message.devices), folder.is_dir())


def main() -> None:
    """Serve on stdin and stdout. Other output of this process goes to stderr: stdout carries messages only."""
    sink = os.dup(1)
    os.dup2(2, 1)
    # sending blocks for as long as it takes: the silence of the other direction decides when the watcher is lost
    source = os.fdopen(0, "rb", buffering=0, closefd=False)
    Agent(MessageStream(source, os.fdopen(sink, "wb", buffering=0), send_seconds=None)).serve()


if __name__ == "__main__":
    main()

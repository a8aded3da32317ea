"""The connection to an agent: a child process, ssh or the agent itself, with messages on its stdin and stdout.

No method blocks: unsent bytes are kept, so that a host that does not answer cannot delay the others.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

from autopipe.launch.remote import protocol
from autopipe.launch.remote.connections import Lost
from autopipe.launch.remote.stream import MessageStream, StreamError

_CHUNK_BYTES = 65536
_LONGEST_ERRORS = 4000
_EXIT_SECONDS = 2.0
# ssh's exit code for its own failures, and for a remote command that a signal ended
_SSH_FAILED = 255


class AgentProcess:
    """The connection to one host's agent."""

    def __init__(self, host: str, command: Sequence[str], python: str) -> None:
        """Start the command. ``python``: the interpreter on the host, for messages. Raises: OSError."""
        self.host, self.command, self._python = host, tuple(command), python
        # in a new session, so that Ctrl-C in the terminal reaches this process and not ssh
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self._stderr: BinaryIO = self.process.stderr  # type: ignore[assignment]  # binary, as text is not requested
        os.set_blocking(self._stderr.fileno(), False)
        # a login shell may print a greeting, which is not a message
        self._stream = MessageStream(self.process.stdout, self.process.stdin, strict=False, send_seconds=0)
        self._heard = time.monotonic()
        self._answered = False  # whether a message has ever arrived
        self._ended = False  # whether stdout is at its end
        self._dropped = ""
        self._errors = b""
        self.offset_ns = 0

    def readable(self) -> Sequence[Any]:
        """Return stdout and stderr, as long as they are open."""
        return [*([] if self._ended else [self._stream]), *([] if self._stderr.closed else [self._stderr])]

    def writable(self) -> Sequence[Any]:
        """Return stdin while bytes are unsent."""
        return [self._stream.sink] if self._stream.unsent else []

    def send(self, message: protocol.Message) -> None:
        """Send a message, or as much of it as the process takes now."""
        if self._stream.sink_closed:
            return
        try:
            self._stream.send(message)
        except StreamError:
            self._stream.close_sink()  # it does not read; its end shows on stdout

    def receive(self) -> Sequence[protocol.Message]:
        """Return the messages that have arrived, and send what is unsent."""
        if self._stream.unsent:
            with contextlib.suppress(StreamError):
                self._stream.flush()
        self._read_errors()
        if self._ended:
            return []
        try:
            size = self._stream.num_received
            messages = self._stream.receive()
        except StreamError:
            self._ended = True
            return []
        if self._stream.num_received > size:
            self._heard = time.monotonic()
        self._answered = self._answered or bool(messages)
        return messages

    def _read_errors(self) -> None:
        """Keep the end of what the process prints on stderr."""
        if self._stderr.closed:
            return
        try:
            chunk = os.read(self._stderr.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._stderr.close()
        self._errors = (self._errors + chunk)[-_LONGEST_ERRORS:]

    def drop(self, reason: str) -> None:
        """Consider the host lost."""
        self._dropped = reason

    def lost(self) -> Lost | None:
        """Return why the host is lost, None while it answers."""
        if self._dropped:
            return Lost(f"the agent on {self.host} is out of order: {self._dropped}", "check that machine")
        if not self._ended:
            silence = time.monotonic() - self._heard
            if silence < protocol.LOST_SECONDS + (0 if self._answered else protocol.ANSWER_SECONDS):
                return None
            return Lost(
                f"host {self.host} does not answer any more: nothing heard for {silence:.0f} s",
                "check the machine and its network; its ranks end by themselves when they hear nothing",
            )
        return self._explain_end()

    def _explain_end(self) -> Lost:
        """Return how the process ended."""
        ssh, code = self.command[0] == "ssh", self._exit_code(1.0)
        self._read_errors()
        lines = self._errors.decode("utf-8", "replace").strip().splitlines()
        last = lines[-1] if lines else ""
        failed = ssh and code == _SSH_FAILED
        if not self._answered and code is not None and code < 0:
            return Lost(
                f"{self.command[0]}, which starts the agent on {self.host}, was killed by signal {-code}",
                "a user or the kernel ended it on this machine: see its log, and start again",
            )
        if not self._answered and not failed:
            return Lost(
                f"the agent cannot be started on {self.host}: {last or f'exit code {code}'}",
                f"install autopipe there for {self._python}, or name another Python with --remote-python",
            )
        if failed and last:
            return Lost(f"ssh to {self.host} failed: {last}", f"check: ssh {self.host} true")
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        if failed:
            how = "killed there, or its connection was closed"
        return Lost(
            f"the agent on {self.host} is gone ({how}){f': {last}' if last else ''}",
            "a user or the kernel ended it; see that machine's log",
        )

    def _exit_code(self, seconds: float) -> int | None:
        """Return the exit code of the process, None if it has not ended."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill the process on this machine. The agent on a lost host ends when the connection is silent."""
        self.process.kill()

    def close(self) -> None:
        """End the process: by the end of its stdin, which an agent detects, else by force."""
        self._stream.close_sink()
        if self._exit_code(_EXIT_SECONDS) is None:
            self.process.kill()
            self.process.wait()
        self._stream.close()
        self._stderr.close()

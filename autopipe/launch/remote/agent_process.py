"""A link to an agent: a child process (ssh, or the agent itself) that takes JSON lines and answers in JSON lines.

Nothing here waits: what cannot be written yet is kept, and what has arrived is returned, so that one host that does not
answer cannot keep the others waiting.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

_CHUNK = 65536
_LONGEST_ERRORS = 4000
# at a time: a host that says more than can be taken in must not keep the others waiting
_MOST_BYTES = 2**20
END_SECONDS = 2.0


class Link:
    """One host's link. ``offset_ns``: its clock less ours.

    ``heard``: when the last word arrived, in monotonic seconds; ``spoken``: whether a message ever did.
    """

    def __init__(self, host: str, command: Sequence[str]) -> None:
        self.host, self.command = host, tuple(command)
        # a session of its own: Ctrl-C in the terminal is for us to handle, not for ssh
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.stdin: BinaryIO = self.process.stdin  # type: ignore[assignment]  # of bytes, since no text was asked for
        self.stdout: BinaryIO = self.process.stdout  # type: ignore[assignment]
        self.stderr: BinaryIO = self.process.stderr  # type: ignore[assignment]
        for stream in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(stream.fileno(), False)
        self.heard = time.monotonic()
        self.spoken = False
        self.offset_ns = 0
        self._rest = b""
        self._unsent = b""
        self._errors = b""

    @property
    def errors(self) -> str:
        """What it said on stderr, the end of it."""
        return self._errors.decode("utf-8", "replace").strip()

    @property
    def ended(self) -> bool:
        """Whether nothing more can come: stdout is at its end."""
        return self.stdout.closed

    @property
    def unsent(self) -> bool:
        """Whether something is still to be written."""
        return bool(self._unsent) and not self.stdin.closed

    def streams(self) -> list[Any]:
        """Return what may become readable."""
        return [stream for stream in (self.stdout, self.stderr) if not stream.closed]

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or as much of it as can leave now."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write what can be written."""
        if self.stdin.closed:
            return
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.stdin.fileno(), self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._close(self.stdin)  # it reads no more; that it has ended is seen on its stdout

    def receive(self) -> Iterator[dict[str, Any]]:
        """Return the messages that have arrived. What is no message (a greeting of the login shell) is left out."""
        self._errors = (self._errors + self._read(self.stderr))[-_LONGEST_ERRORS:]
        chunk = self._read(self.stdout)
        if chunk:
            self.heard = time.monotonic()
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict) and isinstance(message.get("kind"), str):
                self.spoken = True
                yield message

    def _read(self, stream: BinaryIO) -> bytes:
        found = b""
        while not stream.closed and len(found) < _MOST_BYTES:
            try:
                chunk = os.read(stream.fileno(), _CHUNK)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            if not chunk:
                self._close(stream)
            found += chunk
        return found

    def _close(self, stream: BinaryIO) -> None:
        with contextlib.suppress(OSError):
            stream.close()

    def exit_code(self, seconds: float = 1.0) -> int | None:
        """Return how the process ended, None where it has not."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """End the process: by the end of its stdin, which an agent understands, else by force."""
        self._close(self.stdin)
        if self.exit_code(END_SECONDS) is None:
            self.process.kill()
            self.process.wait()
        self._errors = (self._errors + self._read(self.stderr))[-_LONGEST_ERRORS:]
        for stream in (self.stdout, self.stderr):
            self._close(stream)

"""``DeviceToken``: lets processes that share a device compute one at a time, alternating at the boundaries of shards.

A rank takes the token before it computes a shard, and gives it back at the end of the shard or while it waits for
copies. The copies need no token: a rank brings its next shard while another one computes. The sweep keeps the token
(``autopipe.sweep.token_keeper``); a process that ends loses it at once.

Each message is one byte: TAKE and GIVE from a rank, GRANTED to it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from autopipe.errors import RunError
from autopipe.runtime.unix_sockets import connected

ADDRESS = "AUTOPIPE_DEVICE_TOKEN"
"""Environment variable: DEVICE:JOB:SOCKET, of which the sweep sets the value for each job that shares its device."""
TAKE, GIVE, GRANTED = b"t", b"g", b"y"
CONNECT_SECONDS = 10.0
# between two reports of a rank that waits, so that the wait does not count as a hang
REPORT_SECONDS = 1.0


class DeviceToken:
    """The token of one device, from the side of a rank.

    Args:
        address: DEVICE:JOB:SOCKET.
        waits: called with what the rank waits for, about once a second.

    Raises: RunError if the address is not valid, or no sweep listens there.

    """

    def __init__(self, address: str, waits: Callable[[str], None]) -> None:
        device, job, path = _parsed(address)
        self.is_taken = False
        self._waits, self._what = waits, f"the token of device {device}"
        try:
            self._socket = connected(path, CONNECT_SECONDS)
            try:
                self._socket.sendall(f"{device}:{job}\n".encode())
            except OSError:
                self._socket.close()
                raise
        except OSError as error:
            raise self._gone(f"cannot connect to {path}: {error}") from None
        self._socket.settimeout(REPORT_SECONDS)

    def take(self) -> None:
        """Wait until no other process computes on the device.

        Raises: RunError if the token's keeper has ended.
        """
        if self.is_taken:
            return
        self._send(TAKE)
        while True:
            try:
                answer = self._socket.recv(1)
            except TimeoutError:
                self._waits(f"wait for {self._what}")
                continue
            except OSError as error:
                raise self._gone(str(error)) from None
            if answer != GRANTED:
                raise self._gone("its keeper has ended")
            self.is_taken = True
            return

    def give(self) -> None:
        """Let another process compute.

        Raises: RunError if the token's keeper has ended.
        """
        if self.is_taken:
            self.is_taken = False
            self._send(GIVE)

    def close(self) -> None:
        """Give the token back, and leave."""
        self.is_taken = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # also for processes that were forked from this one
        self._socket.close()

    def _send(self, message: bytes) -> None:
        try:
            self._socket.sendall(message)
        except OSError as error:
            raise self._gone(str(error)) from None

    def _gone(self, why: str) -> RunError:
        return RunError(
            f"{self._what}, which this job shares with others, is not available: {why}",
            where=f"{ADDRESS}, set by the sweep",
            remedy="continue the sweep with --resume",
        )


def token_of(environment: Mapping[str, str], waits: Callable[[str], None]) -> DeviceToken | None:
    """Return the token that the environment names, or None. Raises: RunError as ``DeviceToken`` does."""
    address = environment.get(ADDRESS)
    return DeviceToken(address, waits) if address else None


def _parsed(address: str) -> tuple[int, int, Path]:
    device, _, rest = address.partition(":")
    job, _, path = rest.partition(":")
    if not (device.isdecimal() and job.isdecimal() and path):
        raise RunError(
            f"{address!r} is not DEVICE:JOB:SOCKET", where=ADDRESS, remedy="unset it: a sweep sets it for its jobs"
        )
    return int(device), int(job), Path(path)

"""A rank on another host, or in a process that a cluster started: it joins the controller, and serves.

``python -m autopipe.script.rank.joining`` is what ssh starts: its task is a JSON line on stdin, and stdin and stdout
are the connection to the controller. It ends when they do.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from autopipe.launch.remote import host_description, network
from autopipe.launch.remote.stream import take_stdin_and_stdout
from autopipe.script.rank.serve import LOSES, at_sigterm, attend, leave
from autopipe.script.rank_locations import hello
from autopipe.script.wire import GoneError, Wire


class _Pipes:
    """stdin and stdout as one end of a connection, with the methods of a socket that ``Wire`` uses."""

    def __init__(self) -> None:
        self._input, self._output = take_stdin_and_stdout()

    def fileno(self) -> int:
        """Return what becomes ready when a message arrives."""
        return self._input

    def recv_into(self, buffer: memoryview) -> int:
        """Read into a buffer; return the number of bytes, 0 at the end."""
        return os.readv(self._input, [buffer])

    def recv_line(self) -> bytes:
        """Read a line, and nothing behind it."""
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = os.read(self._input, 1)
            if not byte:
                break
            line += byte
        return bytes(line)

    def sendall(self, data: bytes | memoryview) -> None:
        """Write everything."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._output, rest) :]

    def close(self) -> None:
        """Close both."""
        os.close(self._input)
        os.close(self._output)


def join(end: Any, rank: int, count: int, timeout: float, interface: str) -> NoReturn:
    """Serve as a rank over a connection, and end this process.

    ``timeout``: seconds until a wait for another rank fails; ``interface``: on which other ranks reach this one.
    """
    end.sendall(hello(rank))
    wires: list[Wire] = []

    def leaves() -> None:  # a launcher ends the other ranks of a host where one has failed
        for wire in wires:
            with contextlib.suppress(GoneError):
                wire.send([LOSES, True])
                wire.close(1.0)

    at_sigterm(leaves)
    wires.append(Wire(end))
    leave(attend(wires[0], rank, count, None, timeout, _own_address(interface)))


def _own_address(interface: str) -> str:
    """Return the address at which other ranks reach this host."""
    if interface:
        return network.address_of(interface)
    return str(host_description.collect(devices=False)["reached_at"]) or "127.0.0.1"


def main() -> None:
    """Run the rank that ssh has started."""
    pipes = _Pipes()
    task = json.loads(pipes.recv_line())
    os.environ.update(task["environment"])
    if not Path(task["folder"]).is_dir():
        where = f"{task['folder']} on {socket.gethostname()}"
        sys.stderr.write(f"there is no folder {where}: put the script there\n")
        os._exit(3)
    os.chdir(task["folder"])
    with contextlib.suppress(BrokenPipeError):
        join(pipes, task["rank"], task["count"], task["timeout"], task["interface"])


if __name__ == "__main__":
    main()

"""Minibatches from the user's own loop over ``Pipeline.steps``, in the process that calls it.

::

    calling process (``commands.loop``)  <--Unix socket-- rank 0: LoopBatches --> Source --> as for other data
                     b"n": the next minibatch, please -->
              <-- two lengths of 8 bytes, JSON, safetensors;  both lengths 0: there is no further minibatch

The socket is in a folder that only this user may enter. Nothing is unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load

from autopipe.errors import RunError
from autopipe.runtime.audit.batch import decoded
from autopipe.runtime.audit.batch import load as load_stored
from autopipe.runtime.events import Reporter
from autopipe.runtime.spilling.token import CONNECT_SECONDS, REPORT_SECONDS
from autopipe.runtime.unix_sockets import connected
from autopipe.workload import Workload
from autopipe.workload.hooks.hook import Hook

NEXT = b"n"
LENGTHS = struct.Struct("!QQ")  # bytes of the JSON text, bytes of the tensors
END = LENGTHS.pack(0, 0)
ORIGIN = "the loop over Pipeline.steps"


@dataclass(frozen=True, slots=True)
class FirstBatch:
    """The ``data`` of the model while it is captured and checked: the first minibatch of a loop, from its files.

    It has no length: how many minibatches the loop gives is not known.
    """

    folder: Path

    def __iter__(self) -> Iterator[Any]:
        """Read the minibatch. Raises: ArtifactError if the files are damaged."""
        yield load_stored(self.folder)[0]


@dataclass(slots=True)
class LoopBatches:
    """The minibatches of a loop, as rank 0 receives them."""

    # of the socket
    address: str
    reporter: Reporter
    # called about every second while the loop gives nothing
    waits: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Any]:
        """Receive one minibatch after the other.

        Raises: RunError if the calling process has ended.
        """
        with self._connected() as connection:
            while True:
                connection.sendall(NEXT)
                text, tensors = LENGTHS.unpack(self._received(connection, LENGTHS.size))
                if not text:
                    return
                tree = json.loads(self._received(connection, text))
                yield decoded(tree, load(bytes(self._received(connection, tensors))))

    def _connected(self) -> socket.socket:
        try:
            connection = connected(Path(self.address), CONNECT_SECONDS)
        except OSError as error:
            raise _gone(str(error)) from None
        connection.settimeout(REPORT_SECONDS)
        return connection

    def _received(self, connection: socket.socket, size: int) -> bytearray:
        received = bytearray(size)
        view, count = memoryview(received), 0
        while count < size:
            try:
                length = connection.recv_into(view[count:])
            except TimeoutError:  # the loop's body may take any time: that is not a hang
                self.reporter.at(f"waiting for {ORIGIN}", waiting=False)
                self.waits()
                continue
            except OSError as error:
                raise _gone(str(error)) from None
            if not length:
                raise _gone("it has closed the connection")
            count += length
        return received


def read_from_loop(workload: Workload, address: str, reporter: Reporter) -> LoopBatches:
    """Replace the data of a workload by the minibatches of the loop at an address."""
    batches = LoopBatches(address, reporter)
    workload.batches.hooks = {**workload.batches.hooks, "data": Hook("data", batches, ORIGIN, "")}
    return batches


def _gone(why: str) -> RunError:
    return RunError(f"the process of {ORIGIN} gives no more minibatches: {why}", remedy="call steps with resume=True")

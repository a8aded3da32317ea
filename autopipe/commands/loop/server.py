"""``BatchServer``: gives the minibatches of a loop to rank 0 (``autopipe.runtime.batches.from_loop``).

Its thread answers one connection, of a process of the same user. The minibatches are encoded in the thread of the loop,
so that an error there is raised in the loop.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from autopipe.errors import ModelFileError
from autopipe.runtime.audit.batch import UnstorableBatchError, encoded
from autopipe.runtime.batches.from_loop import END, LENGTHS, NEXT
from autopipe.runtime.unix_sockets import is_same_user, listening

_NAME = "batches"


class BatchServer:
    """Gives each minibatch once, in order. The socket is in a new folder that only this user may enter."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="autopipe-loop-")).absolute()  # with mode 0700
        self.address = str(self._folder / _NAME)
        self._listener = listening(self._folder / _NAME)
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="autopipe-loop-batches", daemon=True)
        self._thread.start()

    def put(self, message: bytes) -> None:
        """Give a minibatch, as ``message_of`` encodes it."""
        self._messages.put(message)

    def end(self) -> None:
        """Give no further minibatch."""
        self._messages.put(END)

    def close(self) -> None:
        """Close the socket, and remove its folder."""
        self.end()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends a wait for a connection
        self._thread.join()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the rank has ended: the supervisor reports it
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    if is_same_user(connection):
                        self._serve(connection)
                        return

    def _serve(self, connection: socket.socket) -> None:
        message = b""
        while message != END and connection.recv(1) == NEXT:
            message = self._messages.get()
            connection.sendall(message)


def message_of(item: Any, where: str) -> bytes:
    """Return a minibatch as bytes. ``where``: which one it is, for the error.

    Raises: ModelFileError if it contains anything but tensors and plain values.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        text = json.dumps(encoded(item, tensors)).encode()
        data = save({name: tensor.clone() for name, tensor in tensors.items()})  # entries may share memory
    except UnstorableBatchError as error:
        raise _refusal(str(error), where) from None
    except (ValueError, KeyError, TypeError, RuntimeError) as error:  # a dtype that the format lacks
        raise _refusal(f"safetensors cannot store it: {type(error).__name__}: {error}", where) from None
    return LENGTHS.pack(len(text), len(data)) + text + data


def _refusal(why: str, where: str) -> ModelFileError:
    return ModelFileError(
        f"the minibatch cannot be sent to the ranks: {why}",
        where=where,
        remedy="give dense tensors, numbers, texts and None, in tuples, lists and dicts",
    )

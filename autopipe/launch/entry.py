"""The first line of a rank's process. Apart from ``worker``, so that whoever starts a rank need not import torch."""

from __future__ import annotations

import ctypes
import signal
import socket
import sys
from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent goes: kill -9 of the supervisor must leave no orphan."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def rank_entry(text: str, connection: Connection, listener: socket.socket | None) -> None:
    """Run one rank; see ``worker.rank_main``. The fork server has imported it already."""
    from autopipe.launch.worker import rank_main

    rank_main(text, connection, listener)

"""The entry point of a rank's process. Separate from ``worker``, so that the parent need not import torch."""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection


def rank_entry(text: str, connection: Connection, listener: socket.socket | None) -> None:
    """Run one rank; see ``worker.rank_main``. The fork server has imported that module already."""
    from autopipe.launch.rank.worker import rank_main

    rank_main(text, connection, listener)

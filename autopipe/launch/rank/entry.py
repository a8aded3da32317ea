"""The first line of a rank's process. Apart from ``worker``, so that whoever starts a rank need not import torch."""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection


def rank_entry(text: str, connection: Connection, listener: socket.socket | None) -> None:
    """Run one rank; see ``worker.rank_main``. The fork server has imported it already."""
    from autopipe.launch.rank.worker import rank_main

    rank_main(text, connection, listener)

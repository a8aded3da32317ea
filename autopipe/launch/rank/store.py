"""The rendezvous store of the ranks: in a file, or over TCP with rank 0 as the server, on a single address.

By itself, torch's TCP store listens on every interface of the machine, without a password. Therefore it receives a
socket that is already bound to one address.
"""

from __future__ import annotations

import datetime
import os
import socket
from typing import Any

import torch.distributed as dist

from autopipe.launch.remote import network
from autopipe.launch.request import LOOPBACK

FILE, TCP = "file://", "tcp://"


def open_store(
    address: str, rank: int, world_size: int, *, timeout_seconds: float, listener: socket.socket | None = None
) -> Any:
    """Return the store at an address. ``listener``: the bound socket of rank 0; None: rank 0 binds one here.

    Raises: RunError if rank 0 cannot listen; ValueError for an invalid address.
    """
    if address.startswith(FILE):
        return dist.FileStore(  # type: ignore[attr-defined]  # public, but not listed in __all__
            address.removeprefix(FILE), world_size
        )
    host, port = network.parse_tcp(address)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if rank != 0:
        return dist.TCPStore(  # type: ignore[attr-defined]  # as above
            host, port, world_size, is_master=False, timeout=timeout
        )
    bound = listener if listener is not None else network.listen(host, port)
    return dist.TCPStore(  # type: ignore[attr-defined]  # as above
        host,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=bound.detach(),
    )


def choose_interface(store: str, interface: str = "") -> None:
    """Bind the messages between ranks to an interface. The user's environment takes precedence.

    ``store``: the address of the store; ``interface``: "" for the one on the route to it, or loopback for a file.

    Raises: RunError without a route to the store.
    """
    remote = store.startswith(TCP)
    interface = interface or (network.interface_towards(network.parse_tcp(store)[0]) if remote else LOOPBACK)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if remote:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # exactly this one, not a prefix

"""Where the ranks meet: a torch store in a file, or one that rank 0 listens for, on a single address.

torch's own TCP store listens on every interface of the machine and knows no passwords, so it is given a socket that is
bound already.
"""

from __future__ import annotations

import datetime
import os
import socket
from typing import Any

import torch.distributed as dist

from autopipe.launch.remote import network
from autopipe.launch.request import LOOPBACK, WorkerSpec

FILE, TCP = "file://", "tcp://"


def open_store(
    address: str, rank: int, world_size: int, *, timeout_seconds: float, listener: socket.socket | None = None
) -> Any:
    """Return the store at an address. ``listener``: the bound socket of rank 0; without one, rank 0 binds it here.

    Raises: RunError where rank 0 cannot listen; ValueError for an address that is none.
    """
    if address.startswith(FILE):
        return dist.FileStore(  # type: ignore[attr-defined]  # exported, though not by name
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


def choose_interface(spec: WorkerSpec) -> None:
    """Bind the messages between ranks to the spec's interface; what the user's environment says goes before it.

    Raises: RunError where no interface leads to the store.
    """
    remote = spec.store.startswith(TCP)
    interface = spec.interface or (network.interface_towards(network.parse_tcp(spec.store)[0]) if remote else LOOPBACK)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if remote:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def all_have_devices(store: Any, rank: int, world_size: int, mine: bool) -> bool:
    """Whether every rank has a device to itself: all of them must choose the same transport."""
    store.set(f"own-device/{rank}", "1" if mine else "0")
    return all(store.get(f"own-device/{other}") == b"1" for other in range(world_size))

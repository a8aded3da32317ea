"""The launcher for processes that a cluster's own launcher (torchrun, srun, mpirun, Kubeflow, ...) has started.

``autopipe train`` runs once a rank. The process of rank 0 prepares the run and watches it; see
``launch.remote.rendezvous``. If torchrun's agent already listens at MASTER_PORT, rank 0 publishes its own address
there, again after each restart.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from autopipe.errors import RunError, counted
from autopipe.launch.remote import network, peer
from autopipe.launch.remote.protocol import GATHER_SECONDS
from autopipe.launch.remote.rank_environment import RankIdentity
from autopipe.launch.remote.rendezvous import Rendezvous
from autopipe.launch.request import HostCommand, LaunchRequest, LaunchSettings
from autopipe.launch.supervisor import Supervisor
from autopipe.workers.signals import handled_by, ignore_stop_signals

_LEADER = "leader"
_LITERAL = ("127.0.0.1", "::1", "localhost")


@contextlib.contextmanager
def lead(identity: RankIdentity, settings: LaunchSettings) -> Iterator[Rendezvous]:
    """Run as rank 0: listen, and yield the rendezvous with which the run is launched.

    If the body raises, the processes of all ranks exit at once with the same message.

    Raises: RunError if rank 0 cannot listen at the address that the others connect to.
    """
    listener = None if identity.world_size == 1 else _listen(identity, settings)
    rendezvous = Rendezvous(identity, listener)
    try:
        if listener is not None:
            _publish(identity, listener)
        yield rendezvous
    except BaseException as error:
        ignore_stop_signals()
        rendezvous.fail(error)
        raise
    rendezvous.finish(0)


def refuse_other_number(identity: RankIdentity, requested: int | None) -> None:
    """Refuse another number of ranks than the launcher has started. Raises: RunError."""
    if requested is not None and requested != identity.world_size:
        raise RunError(
            f"--gpus is {requested}, but {identity.launcher} has started {counted(identity.world_size, 'rank')}",
            remedy=f"omit --gpus, or start {counted(requested, 'rank')}",
        )


def meeting(identity: RankIdentity, settings: LaunchSettings) -> socket.socket:
    """Return the socket on which rank 0 listens, and where the other ranks find it. Raises: RunError as ``lead``."""
    listener = _listen(identity, settings)
    _publish(identity, listener)
    return listener


def _publish(identity: RankIdentity, listener: socket.socket) -> None:
    if identity.store_exists:
        _torchrun_store(identity).set(_LEADER, network.tcp_address(*listener.getsockname()[:2]))


def follow(identity: RankIdentity, settings: LaunchSettings) -> int:
    """Run as another rank until the run ends, and return the exit code.

    Raises: RunError with the message of the first failure on any rank.
    """
    return peer.follow(identity, peer.connect(*leader(identity, settings)))


def leader(identity: RankIdentity, settings: LaunchSettings) -> tuple[str, int]:
    """Return the host and the port at which rank 0 listens. Raises: RunError if it does not."""
    host, port = identity.address, identity.port
    if identity.store_exists:
        try:
            host, port = network.parse_tcp(_awaited(_torchrun_store(identity)).decode())
        except (RuntimeError, ValueError) as error:
            raise RunError(
                f"rank 0 did not connect within {GATHER_SECONDS:.0f} s: {str(error).splitlines()[0]}",
                where=f"rank {identity.rank} on {socket.gethostname()}",
                remedy="see the launcher's output for rank 0",
            ) from None
    network.refuse_public(network.resolve(host)[1], trusted=settings.trust_network)
    return host, port


def _awaited(store: Any) -> bytes:
    """Return where rank 0 listens, as soon as it says so. A wait of torch's store takes no signals: it is cut short."""
    end = time.monotonic() + GATHER_SECONDS
    while True:
        begun = time.monotonic()
        try:
            store.wait([_LEADER], datetime.timedelta(seconds=1))
        except RuntimeError:
            if time.monotonic() > end or time.monotonic() - begun < 0.5:  # the second: it is gone
                raise
        else:
            return bytes(store.get(_LEADER))


def store_of(identity: RankIdentity, settings: LaunchSettings, *, timeout_seconds: float) -> tuple[Any, str]:
    """Return a torch store that all ranks reach, and the address on whose network they exchange messages.

    Raises: RunError as ``lead`` and ``follow`` do.
    """
    from autopipe.launch.rank.store import open_store  # it imports torch

    if identity.store_exists:
        return _torchrun_store(identity), identity.address
    if identity.rank == 0:
        listener = _listen(identity, settings)
        host, port = listener.getsockname()[:2]
    else:
        listener, (_, host), port = None, network.resolve(identity.address), identity.port
        network.refuse_public(host, trusted=settings.trust_network)
    address = network.tcp_address(host, port)
    store = open_store(address, identity.rank, identity.world_size, timeout_seconds=timeout_seconds, listener=listener)
    return store, host


def run_ranks(request: LaunchRequest, rendezvous: Rendezvous | None) -> None:
    """Start the ranks, each under its own process, and return when all are done.

    Raises: RunError if a process did not connect; WorkerError for the first failure.
    """
    assert rendezvous is not None, "rank 0 calls this inside of lead()"
    with tempfile.TemporaryDirectory(prefix="autopipe-") as scratch, handled_by(request.stop):
        ranks = rendezvous.start(request, Path(scratch))
        try:
            Supervisor(request, ranks).watch()
        finally:
            ranks.end()


def commands(request: LaunchRequest) -> list[HostCommand]:
    """Return one entry, for this process. Each of the other processes shows its own entry."""
    identity = request.settings.identity
    assert identity is not None, "the environment is read before this launcher is used"
    at = "torchrun's agent" if identity.store_exists else f"{identity.address} port {identity.port}"
    note = f"rank {identity.rank} of {identity.world_size}, by {identity.launcher}; meets the others at {at}"
    return [HostCommand(ranks=(identity.rank,), note=note)]


def _torchrun_store(identity: RankIdentity) -> Any:
    """Return the store of torchrun's agent, with a prefix for this attempt.

    Raises: RunError if the agent does not answer.
    """
    import torch.distributed as dist  # other launchers of ranks leave torch to the ranks

    timeout = datetime.timedelta(seconds=GATHER_SECONDS)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but not listed in __all__
            identity.address, identity.port, None, is_master=False, timeout=timeout
        )
    except RuntimeError as error:
        raise RunError(
            f"torchrun's agent does not answer at {identity.address} port {identity.port}: "
            f"{str(error).splitlines()[0]}",
            remedy="check that every host can reach MASTER_ADDR, and that no firewall closes MASTER_PORT",
        ) from None
    return dist.PrefixStore(  # type: ignore[attr-defined]  # as above
        f"autopipe/{identity.attempt}", store
    )


def _listen(identity: RankIdentity, settings: LaunchSettings) -> socket.socket:
    """Return the listening socket of rank 0, on one address. Raises: RunError."""
    if settings.interface:
        address = network.address_of(settings.interface)
    elif identity.store_exists:
        address = network.own_address_towards(identity.address)
    else:
        address = _own_address(identity)
    network.refuse_public(address, trusted=settings.trust_network)
    return network.listen(address, 0 if identity.store_exists else identity.port)


def _own_address(identity: RankIdentity) -> str:
    """Return the address of this host that the others know as MASTER_ADDR.

    A host often resolves its own name to a loopback address (Debian: 127.0.1.1), which others cannot reach.

    Raises: RunError if MASTER_ADDR is an address of another host, or this host has several addresses.
    """
    _, address = network.resolve(identity.address)
    if not network.is_loopback(address) or identity.one_host or identity.address in _LITERAL:
        if network.is_loopback(address) or network.interface_of(address):
            return address
        raise RunError(
            f"rank 0 is on {socket.gethostname()}, but MASTER_ADDR ({identity.address}, {address}) is not an address "
            "of this host",
            remedy="set MASTER_ADDR to the host of rank 0",
        )
    others = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not network.is_loopback(entry.address)
    ]
    if len(others) != 1:
        raise RunError(
            f"{identity.address} resolves to {address} on this host, which no other host can reach; this host has "
            f"{counted(len(others), 'other address')}: {', '.join(others) or 'none'}",
            remedy="set MASTER_ADDR to the address itself, or give --interface NAME",
        )
    return others[0]

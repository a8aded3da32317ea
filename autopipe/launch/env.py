"""The launcher that starts nothing: a cluster's own (torchrun, srun, mpirun, Kubeflow, ...) has started every process.

``autopipe train`` itself runs once a rank. That of rank 0 prepares the run and watches it; see
``launch.remote.rendezvous``.
Where torchrun's agent listens at MASTER_PORT already, rank 0 writes there where it listens itself, for each restart.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from autopipe.errors import RunError, counted
from autopipe.launch.rank.signals import handled_by, ignore_stop_signals
from autopipe.launch.remote import network, peer
from autopipe.launch.remote.identity import RankIdentity
from autopipe.launch.remote.rendezvous import GATHER_SECONDS, Rendezvous
from autopipe.launch.request import HostCommand, LaunchRequest, LaunchSettings
from autopipe.launch.supervisor import Supervisor

_LEADER = "leader"
_LITERAL = ("127.0.0.1", "::1", "localhost")


@contextlib.contextmanager
def lead(here: RankIdentity, settings: LaunchSettings) -> Iterator[Rendezvous]:
    """Be rank 0: listen from now on, and yield the settings with which the run is launched.

    Whatever the body fails of, the processes of all ranks fail of it, at once and with the same message.

    Raises: RunError where rank 0 cannot listen where the others will look for it.
    """
    listener = None if here.world_size == 1 else _listen(here, settings)
    rendezvous = Rendezvous(here, listener)
    try:
        if listener is not None and here.store_exists:
            place = network.tcp_address(*listener.getsockname()[:2])
            _agents_store(here).set(_LEADER, place)
        yield rendezvous
    except BaseException as error:
        ignore_stop_signals()
        rendezvous.fail(error)
        raise
    rendezvous.finish(0)


def follow(here: RankIdentity, settings: LaunchSettings) -> int:
    """Be another rank, to the end of the run, and return the exit code.

    Raises: AutopipeError with the message of the first failure, whichever rank it was on.
    """
    host, port = here.address, here.port
    if here.store_exists:
        try:
            host, port = network.parse_tcp(_agents_store(here).get(_LEADER).decode())
        except (RuntimeError, ValueError) as error:
            raise RunError(
                f"rank 0 did not come within {GATHER_SECONDS:.0f} s: {str(error).splitlines()[0]}",
                where=f"rank {here.rank} on {socket.gethostname()}",
                remedy="look at what the launcher says of rank 0",
            ) from None
    network.refuse_public(network.resolve(host)[1], trusted=settings.trust_network)
    return peer.follow(here, peer.connect(host, port))


def run_ranks(request: LaunchRequest, rendezvous: Rendezvous | None) -> None:
    """Start the ranks, each under its own process, and return when all are done.

    Raises: RunError where a process did not come; WorkerError for the first failure.
    """
    assert rendezvous is not None, "rank 0 calls this inside of lead()"
    with tempfile.TemporaryDirectory(prefix="autopipe-") as scratch, handled_by(request.stop):
        ranks = rendezvous.start(request, Path(scratch))
        try:
            Supervisor(request, ranks).watch()
        finally:
            ranks.end()


def commands(request: LaunchRequest) -> list[HostCommand]:
    """Return this process alone: the others were started like it, and say for themselves what they would do."""
    here = request.settings.identity
    assert here is not None, "whoever asks for this launcher reads the environment first"
    at = "torchrun's agent" if here.store_exists else f"{here.address} port {here.port}"
    note = f"rank {here.rank} of {here.world_size}, by {here.launcher}; meets the others at {at}"
    return [HostCommand(ranks=(here.rank,), note=note)]


def _agents_store(here: RankIdentity) -> Any:
    """Return what torchrun's agent keeps, under names of this attempt's own.

    Raises: RunError where the agent does not answer.
    """
    import torch.distributed as dist  # a process that only follows need not import it otherwise

    timeout = datetime.timedelta(seconds=GATHER_SECONDS)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # exported, though not by name
            here.address, here.port, None, is_master=False, timeout=timeout
        )
    except RuntimeError as error:
        raise RunError(
            f"torchrun's agent does not answer at {here.address} port {here.port}: {str(error).splitlines()[0]}",
            remedy="check that every host can reach MASTER_ADDR, and that no firewall closes MASTER_PORT",
        ) from None
    return dist.PrefixStore(  # type: ignore[attr-defined]  # the same
        f"autopipe/{here.attempt}", store
    )


def _listen(here: RankIdentity, settings: LaunchSettings) -> socket.socket:
    """Return the socket of rank 0, on one address. Raises: RunError."""
    if settings.interface:
        address = network.address_of(settings.interface)
    elif here.store_exists:
        address = network.own_address_towards(here.address)
    else:
        address = _own(here)
    network.refuse_public(address, trusted=settings.trust_network)
    return network.listen(address, 0 if here.store_exists else here.port)


def _own(here: RankIdentity) -> str:
    """Return the address of this host that the others know as MASTER_ADDR.

    A host often takes its own name for an address of itself alone (Debian: 127.0.1.1), which others cannot reach.

    Raises: RunError where it is no address of this host, or it is not clear which.
    """
    _, address = network.resolve(here.address)
    if not network.is_loopback(address) or here.one_host or here.address in _LITERAL:
        if network.is_loopback(address) or network.interface_of(address):
            return address
        raise RunError(
            f"rank 0 is on {socket.gethostname()}, and MASTER_ADDR ({here.address}, {address}) is no address of it",
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
            f"{here.address} means {address} on this host, which no other host can reach; this host has "
            f"{counted(len(others), 'other address')}: {', '.join(others) or 'none'}",
            remedy="set MASTER_ADDR to the address itself, or say --interface NAME",
        )
    return others[0]

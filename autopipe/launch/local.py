"""The local launcher: every rank is a process on this machine. They rendezvous in a file, so no port is open."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from autopipe.ir import artifact
from autopipe.launch.rank.forked import ForkedRanks
from autopipe.launch.request import LOOPBACK, HostCommand, LaunchRequest, WorkerSpec
from autopipe.launch.supervisor import Supervisor
from autopipe.workers.signals import handled_by


def run_ranks(request: LaunchRequest, rendezvous: object = None) -> None:
    """Start the ranks and return when all are done. No rank is left running, however this returns.

    Raises: WorkerError for the first failure.
    """
    with tempfile.TemporaryDirectory(prefix="autopipe-") as scratch, handled_by(request.stop):
        ranks = ForkedRanks(Path(scratch), request.world_size)
        try:
            for rank in range(request.world_size):
                ranks.start(_spec(request, rank, Path(scratch)))
            Supervisor(request, ranks).watch()
        finally:
            ranks.end()


def commands(request: LaunchRequest) -> list[HostCommand]:
    """Return one entry a rank. None has a command: each is forked, and reads its instructions as JSON."""
    note = "forked from a process that has imported torch"
    specs = [_spec(request, rank, Path("SCRATCH")) for rank in range(request.world_size)]
    return [HostCommand(ranks=(spec.rank,), stdin=json.dumps(artifact.encode(spec)), note=note) for spec in specs]


def _spec(request: LaunchRequest, rank: int, scratch: Path) -> WorkerSpec:
    return request.worker_spec(
        rank,
        store=f"file://{scratch / 'store'}",
        heartbeats=str(scratch / "heartbeats"),
        interface=LOOPBACK,
        local_rank=rank,
        local_world_size=request.world_size,
    )

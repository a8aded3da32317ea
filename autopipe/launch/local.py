"""The local launcher: every rank a process on this machine; they meet in a file, so nothing listens for strangers."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from autopipe.ir import artifact
from autopipe.launch.rank.forked import PRELOAD, ForkedRanks
from autopipe.launch.rank.signals import taken
from autopipe.launch.request import LOOPBACK, HostCommand, Launch, WorkerSpec
from autopipe.launch.supervisor import Supervisor


def launch(request: Launch) -> None:
    """Start the ranks and return when all are done.

    Raises: WorkerError for the first failure. Whatever way it ends, no rank is left.
    """
    with tempfile.TemporaryDirectory(prefix="autopipe-") as scratch, taken(request.stop):
        ranks = ForkedRanks(Path(scratch), request.world_size)
        try:
            for rank in range(request.world_size):
                ranks.start(_spec(request, rank, Path(scratch)))
            Supervisor(request, ranks).watch()
        finally:
            ranks.end()


def commands(request: Launch) -> list[HostCommand]:
    """Return one entry a rank. None has a command: each is forked, and told what it is to do as JSON."""
    note = f"forked from a process that has imported {', '.join(PRELOAD)}"
    specs = [_spec(request, rank, Path("SCRATCH")) for rank in range(request.world_size)]
    return [HostCommand("", (spec.rank,), (), json.dumps(artifact.encode(spec)), note) for spec in specs]


def _spec(request: Launch, rank: int, scratch: Path) -> WorkerSpec:
    return WorkerSpec(
        run=str(request.run.path.resolve()),
        rank=rank,
        world_size=request.world_size,
        store=f"file://{scratch / 'store'}",
        heartbeats=str(scratch / "heartbeats"),
        body=request.body,
        timeout_seconds=request.timeout_seconds,
        batch_size=request.batch_size,
        evaluation_data=request.evaluation_data,
        averaged=request.averaged,
        interface=LOOPBACK,
        local_rank=rank,
        local_world_size=request.world_size,
    )

"""Whether the checkpoints of a run fit the disk, before anything is trained."""

from __future__ import annotations

import shutil
from pathlib import Path

from autopipe.commands.planning.choose import with_averages
from autopipe.commands.prepared import Prepared
from autopipe.commands.settings import TrainSettings
from autopipe.errors import RunError, counted
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.job import RunDirectory
from autopipe.units import in_bytes


def refuse_full_disk(
    settings: TrainSettings, prepared: Prepared, path: Path | None, every: int, start: int = 0
) -> None:
    """Refuse a run whose checkpoints do not fit the free space.

    ``path``: of the resumed run; ``every``: steps between checkpoints; ``start``: the steps that are done already.

    A new checkpoint is complete before the oldest is removed. Raises: RunError with the sizes.
    """
    folder = path or settings.run_dir or settings.plan.work_dir
    each = _bytes_of_a_checkpoint(prepared)
    kept = settings.keep_checkpoints
    count = 1 + (max(settings.steps - start - 1, 0) // every if settings.steps and every else 0)
    if kept:
        there = 0 if path is None else len(checkpoints.steps(RunDirectory(path).checkpoints))
        count = max(min(count, kept + 1 - there), 1)
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free >= count * each:
        return
    fewer = ", keep fewer (--keep-checkpoints 1)" if count > 1 else ""
    amount = f"{counted(count, 'checkpoint')} of {in_bytes(each)}{' each' if count > 1 else ''}"
    raise RunError(
        f"{amount} will be written, but {in_bytes(free)} are free",
        where=str(folder),
        remedy=f"free {in_bytes(count * each - free)}{fewer}, or give a --run-dir on another disk",
    )


def _bytes_of_a_checkpoint(prepared: Prepared) -> int:
    """Return the bytes of parameters, buffers and optimizer state."""
    graph, profile = prepared.graph, with_averages(prepared.profile, prepared.record.request)
    values = sum(spec.num_bytes({}) for spec in (*graph.parameters.values(), *graph.buffers.values()))
    trained = sum(spec.num_bytes({}) for spec in graph.parameters.values() if spec.requires_grad)
    return round(values + trained * profile.optimizer_bytes_per_byte)

"""Convert the settings of a command to a ``PlanRequest``. Reads the cluster file and the schedule file."""

from __future__ import annotations

from pathlib import Path

from autopipe.commands.settings import PlanSettings
from autopipe.errors import PlanError
from autopipe.planning import read_cluster
from autopipe.planning.cost.datasheets import datasheet
from autopipe.planning.requests import PlanRequest


def request_of(settings: PlanSettings) -> PlanRequest:
    """Return the request of the settings. Raises: PlanError if the cluster file or the schedule file cannot be read."""
    figures, order = settings.cluster, settings.order
    if figures.device_name is not None:
        datasheet(figures.device_name)  # an unknown name is refused before anything is measured
    grid = None if order.file is None else _read(order.file)
    if grid is not None and settings.schedule not in (None, "custom"):
        raise PlanError(
            f"--schedule {settings.schedule} and --schedule-file {order.file} give two different orders",
            remedy="omit one of them; --schedule-file alone implies --schedule custom",
        )
    return PlanRequest(
        gpus=settings.gpus,
        batch_size=settings.batch_size,
        schedule=settings.schedule if grid is None else "custom",
        num_microbatches=settings.num_microbatches,
        microbatch_size=settings.microbatch_size,
        recompute=settings.recompute,
        cluster=None if figures.file is None else read_cluster(figures.file),
        gpu_memory_bytes=figures.gpu_memory_bytes,
        link=figures.link,
        replicas=settings.replicas,
        device_name=figures.device_name,
        vertical_sync=order.vertical_sync,
        stages_per_rank=order.stages_per_rank,
        warmup_depth=order.warmup_depth,
        grid=grid,
        exact_ties=settings.exact_ties,
        shard_optimizer=settings.shard_optimizer,
        team=settings.tensor_parallel,
        sequence=settings.sequence_parallel,
        averages=None if settings.ema is None else settings.ema > 0,
    )


def _read(path: Path) -> str:
    """Return the text of a schedule file. Raises: PlanError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"the schedule file cannot be read: {error}",
            where=str(path),
            remedy="give a text file with one line per rank",
        ) from error

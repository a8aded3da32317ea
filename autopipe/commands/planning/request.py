"""Convert the settings of a command to a ``PlanRequest``, and choose the microbatch sizes that are measured.

Reads the cluster file and the schedule file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autopipe.commands.settings import PlanSettings
from autopipe.commands.trusted_code import arguments_of
from autopipe.errors import PlanError, counted
from autopipe.ir.profile import COUNTED, Profile
from autopipe.planning import read_cluster
from autopipe.planning.cost.datasheets import datasheet
from autopipe.planning.requests import PlanRequest

MICROBATCH_SIZES = (1, 2, 4, 8)
COUNTED_SIZES = (1, 8)  # operations and bytes of sizes between them are interpolated: they grow with the batch
SLOW_SECONDS = 15.0  # after which no larger size is measured, unless an option names it
BETWEEN_SECONDS = 0.02  # the longest forward and backward of a size that is measured although others enclose it
ENOUGH_SECONDS = {False: 3.0, True: 0.6}  # after which measuring is not repeated, for a profile and for a plan
QUICK_SECONDS = 0.25  # the longest forward and backward of a size that is measured only for a large minibatch


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


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a command says about the microbatch sizes to measure."""

    exact: tuple[int, ...] = ()  # those that its plan will have
    batch_size: int | None = None  # of a minibatch; None for the data's own
    few: bool = False  # of a model that is counted: the sizes between are interpolated
    quick: bool = False  # for a plan: what takes long is interpolated, or measured less often


NO_SIZES = Sizes()


def larger_sizes(batch_size: int) -> tuple[int, ...]:
    """Return the sizes to measure for a large minibatch beside MICROBATCH_SIZES, down from a quarter of it."""
    sizes, size = [], -(-batch_size // 4)
    while size > MICROBATCH_SIZES[-1]:
        sizes.append(size)
        size = -(-size // 4)
    return tuple(reversed(sizes))


def unmeasured(profile: Profile, batch_size: int) -> str:
    """Return a note if the profile has only microbatches that are small for a minibatch, or ""."""
    largest = max(profile.measurements, key=lambda measurement: measurement.microbatch_size)
    size = largest.microbatch_size
    better = [other for other in larger_sizes(batch_size) if other >= 2 * size]
    seconds = sum(cost.forward_seconds + cost.backward_seconds for cost in largest.costs.values())
    # a counted profile has no times, and larger sizes were counted as far as they are quick
    complete = profile.device.kind == COUNTED or not profile.graph.symbols
    if complete or not better or better[0] / size * seconds > QUICK_SECONDS:
        return ""
    sizes = ",".join(map(str, (*MICROBATCH_SIZES, *larger_sizes(batch_size))))
    return (
        f"no microbatch of more than {counted(size, 'sample')} was measured; larger ones may be faster for a minibatch "
        f"of {batch_size}: autopipe profile {arguments_of(profile.workload)} --microbatch-sizes {sizes}"
    )

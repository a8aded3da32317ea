"""Whether checkpoints fit the disk; choose the one to resume from, compare it with the model."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from autopipe.commands.planning.choose import with_averages
from autopipe.commands.prepared import Prepared
from autopipe.commands.settings import TrainSettings
from autopipe.errors import ArtifactError, AutopipeError, RunError, counted
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan
from autopipe.runtime.after_step.average import PREFIX
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.checkpoint.checkpoint import Checkpoint, intact
from autopipe.runtime.context import RunContext
from autopipe.runtime.job import RunDirectory
from autopipe.units import in_bytes
from autopipe.verify.check import staleness

if TYPE_CHECKING:
    from torch import nn

    from autopipe.workload import Workload


_PREFIX = "model."


def chosen(run: RunDirectory, step: int | None) -> Checkpoint:
    """Return the checkpoint of a step, or the newest for None, after all its files were verified.

    Raises: RunError if it does not exist; ArtifactError if it is damaged, with the steps that are intact.
    """
    steps = checkpoints.steps(run.checkpoints)
    if not steps:
        raise RunError(
            f"--resume: there is no checkpoint in {run.path}",
            where=str(run.checkpoints),
            remedy="name the run with --run-dir, or train without --resume",
        )
    if step is not None and step not in steps:
        raise RunError(
            f"there is no checkpoint of step {step}; there are {', '.join(map(str, steps))}",
            where=str(run.checkpoints),
            remedy=f"--resume {max((s for s in steps if s < step), default=steps[-1])}",
        )
    wanted = steps[-1] if step is None else step
    try:
        source = Checkpoint(checkpoints.directory_of(run.checkpoints, wanted))
        source.verify()
    except ArtifactError as error:
        raise ArtifactError(
            f"the checkpoint of step {wanted} is damaged: {error.what}", where=error.where, remedy=_remedy(run, wanted)
        ) from None
    return source


def _remedy(run: RunDirectory, damaged: int) -> str:
    whole = [step for step in intact(run.checkpoints) if step != damaged]
    if not whole:
        return "no other checkpoint of this run is intact: start a new run (another --run-dir)"
    return f"--resume {whole[-1]} (intact: {', '.join(map(str, whole))})"


def newest_intact(run: RunDirectory) -> int:
    """Return the step of the newest intact checkpoint, or -1 without one."""
    for step in reversed(checkpoints.steps(run.checkpoints)):
        try:
            Checkpoint(checkpoints.directory_of(run.checkpoints, step)).verify()
        except ArtifactError:
            continue
        return step
    return -1


def refuse_other_model(source: Checkpoint, graph: Graph) -> None:
    """Refuse a checkpoint of another model. Raises: RunError naming the first parameter that differs."""
    if source.manifest.graph_digest == graph.model_digest:
        return
    saved = {name.removeprefix(_PREFIX): shape for name, shape in source.shapes().items() if name.startswith(_PREFIX)}
    # other tensors of the checkpoint are buffers, which may differ
    wanted = _shapes(graph)
    gone = [name for stage in source.stages for name in stage.owned if name not in wanted]
    what = _difference(wanted, saved) or (f"{gone[0]} was removed" if gone else "")
    what = (
        what or f"the parameters are equal, the computation is not ({source.manifest.graph_digest} -> {graph.digest})"
    )
    raise RunError(
        f"the checkpoint belongs to another model: {what}",
        where=str(source.directory),
        remedy="restore the former model file, or start a new run (another --run-dir)",
    )


def lacking_version(source: Checkpoint, plan: Plan, graph: Graph) -> str:
    """Return a description of the older weights that the plan's schedule needs and the checkpoint lacks, or ""."""
    step, saved = source.manifest.step, set(source.names)
    for name, delta in staleness(RunContext.of(plan, graph)).items():
        for version in range(max(step - delta, 0), step):
            if name in graph.moving and f"version.{version}.{name}" not in saved:
                return f"{plan.schedule} needs {name} after step {version}, which the checkpoint does not have"
    return ""


def refuse_lacking_version(source: Checkpoint, plan: Plan, graph: Graph) -> None:
    """Refuse to resume with a schedule whose older weights the checkpoint lacks. Raises: RunError."""
    what = lacking_version(source, plan, graph)
    if what:
        raise RunError(
            what,
            where=str(source.directory),
            remedy="continue with the run's plan, or use a schedule without stale weights: --schedule 1f1b",
        )


def refuse_without_averages(source: Checkpoint) -> None:
    """Refuse a checkpoint without averaged weights. Raises: RunError."""
    if not any(name.startswith(PREFIX) for name in source.names):
        raise RunError(
            f"the checkpoint of step {source.manifest.step} has no averaged weights",
            where=str(source.directory),
            remedy="omit --ema; or train with --ema DECAY, which also works with --resume",
        )


def skeleton(workload: Workload) -> nn.Module:
    """Return the model, without memory for its parameters if it can be built so; only their shapes are needed."""
    try:
        return workload.build_model(empty=True)
    except AutopipeError:
        return workload.build_model()


def refuse_other_parameters(graph: Graph, model: nn.Module, where: Path) -> None:
    """Refuse a model file that has changed since the run. Raises: RunError naming the first parameter that differs."""
    wanted = _shapes(graph)
    now = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    what = _difference(now, wanted) or next((f"{name} was removed" for name in wanted if name not in now), "")
    if what:
        raise RunError(
            f"the model has changed since this run: {what}",
            where=str(where),
            remedy="restore the model file of the run",
        )


def _shapes(graph: Graph) -> dict[str, tuple[int, ...]]:
    return {name: graph.model_shapes[name] for name in graph.parameters}


def _difference(now: Mapping[str, tuple[int, ...]], before: Mapping[str, tuple[int, ...]]) -> str:
    """Return the first difference of ``now`` from ``before``, or ""."""
    for name, shape in now.items():
        if name not in before:
            return f"{name} {list(shape)} is new"
        if before[name] != shape:
            return f"{name} was {list(before[name])} and is {list(shape)}"
    return ""


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

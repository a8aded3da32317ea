"""What the processes of a sweep do: prepare the jobs of one structure, or train a job for one lease.

Each process is forked from the server of the sweep, which has imported torch, and starts a fork server of its own for
its ranks. Tasks are JSON values.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopipe.commands import option_values
from autopipe.commands.artifact_steps import batch_size_of, prepare
from autopipe.commands.checking.first_steps import check_first
from autopipe.commands.locks import only_one
from autopipe.commands.options import launch_settings, train_settings
from autopipe.commands.prepared import Prepared
from autopipe.commands.settings import Events, PlanSettings, TrainSettings
from autopipe.commands.training import runs
from autopipe.commands.training.checkpoints import newest_intact
from autopipe.errors import AutopipeError, DoesNotFitError, RunError
from autopipe.ir import decoding
from autopipe.launch.rank.worker import redirect_output
from autopipe.options.commands import PlanOptions, ProfileOptions, TrainOptions, options_of
from autopipe.planning.spilled.explain import COMPUTE, TO_DEVICE, TO_HOST, bounds_of
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.job import RunDirectory
from autopipe.runtime.spilling.token import ADDRESS
from autopipe.sweep.devices import as_visible
from autopipe.workers.errors import described
from autopipe.workers.task import Link

# seconds between two messages about steps: the supervisor shows them, and the run has them all in its metrics
_STEP_SECONDS = 0.1
_SENT = ("progress", "note", "start", "step", "checkpoint", "evaluation", "stopping", "restart", "nonfinite")
_OF_THE_PLAN = options_of(PlanOptions).keys() - options_of(ProfileOptions).keys() - {"ema"}
_OF_THE_PLAN |= {"batch_size", "tensor_parallel", "sequence_parallel"}
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(frozen=True, slots=True)
class PrepareTask:
    """The jobs of one structure, which share their profile, their plan and their stage files."""

    target: str
    options: str  # of the first job, as JSON
    work_dir: str
    devices: tuple[int, ...]  # GPUs; () on a CPU
    log: str  # the file for what the user's code prints
    parts: int  # a spilled plan uses one of so many parts of the memory of the device, if it fits
    # options of the jobs whose first steps are compared with plain training, as JSON; one for each kind of comparison
    checks: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseTask:
    """One lease of a job."""

    target: str
    options: str  # as JSON
    work_dir: str
    run_dir: str
    shared: str  # the folder of the prepared artifacts
    devices: tuple[int, ...]  # GPUs; () on a CPU
    log: str
    steps: int  # up to which it trains; 0: as its options say
    checkpoint_every: int  # if its options do not say it
    evaluate_at_end: bool
    spilled: bool  # its stages take turns on the device
    part_bytes: int  # the part of the device's memory that its plan uses; 0: as its options say
    token: str  # where it takes the token of a device that it shares; "" if it does not


def prepare_jobs(task: Any, link: Link) -> dict[str, Any]:
    """Capture, measure, plan and check the model of a structure. ``task``: a ``PrepareTask``.

    Returns the figures that the supervisor predicts with, and for each comparison its error or None.

    Raises: the errors of ``prepare``.
    """
    wanted: PrepareTask = decoding.decode(PrepareTask, task, "task")
    _begin(wanted.devices, Path(wanted.log))

    def progress(what: str, fraction: float) -> None:
        link.progress(what, fraction)

    settings = _settings(wanted.target, wanted.options, Path(wanted.work_dir))
    with only_one(settings.plan.work_dir, "prepares the jobs of a sweep"):
        settings, prepared = _prepared(settings, progress)
        part, spilled = None, settings.plan.schedule == "spilled"
        if spilled and wanted.parts > 1 and settings.plan.gpus == 1:
            settings, prepared, part = _prepared_part(settings, prepared, wanted.parts, progress)
        notes: list[str] = []
        errors = [_checked(settings, check, wanted, prepared, notes) for check in wanted.checks]
    return {
        "step_seconds": prepared.plan.predicted.step_seconds,
        "batch_size": prepared.plan.batch_size,
        "epoch_steps": prepared.workload.batches.epoch_length(batch_size_of(prepared.workload, prepared.plan)),
        "schedule": prepared.plan.schedule,
        "spilled": spilled,
        "part_bytes": part,
        **_load(prepared, spilled),
        "kind": prepared.profile.device.kind,
        "notes": [
            *_about_spilling(wanted.options, settings),
            *prepared.notes,
            *(f"warning: {warning}" for warning in prepared.warnings),
        ],
        "compared": notes,
        "errors": errors,
    }


def _prepared(settings: TrainSettings, progress: Any) -> tuple[TrainSettings, Prepared]:
    """Prepare a job; if it does not fit its one device and no schedule was named, with stages that take turns."""
    try:
        return settings, prepare(settings.plan, progress)
    except DoesNotFitError:
        if settings.plan.schedule not in (None, "auto") or settings.plan.gpus != 1:
            raise
        plan = _spilled(settings.plan)
        try:
            return dataclasses.replace(settings, plan=plan), prepare(plan, progress)
        except DoesNotFitError as refused:
            what = f"the model fits its device neither as a whole nor with stages that take turns: {refused.what}"
            remedy = f"train it as a pipeline over several devices with gpus = 2 or more, or {refused.remedy}"
            raise DoesNotFitError(what, where=refused.where, remedy=remedy) from None


def _prepared_part(
    settings: TrainSettings, prepared: Prepared, parts: int, progress: Any
) -> tuple[TrainSettings, Prepared, int | None]:
    """Prepare a spilled job again, with a part of the memory of its device.

    Returns the bytes of the part, 0 if there is no limit, None if the job needs the device for itself: it does not fit
    the part, or a cluster file gives its memory.
    """
    memory = prepared.cluster.memory_of(0)
    if not memory:
        return settings, prepared, 0
    if settings.plan.cluster.file is not None:
        return settings, prepared, None
    smaller = _in_part(settings.plan, memory // parts)
    try:
        return dataclasses.replace(settings, plan=smaller), prepare(smaller, progress), memory // parts
    except DoesNotFitError:
        return settings, prepare(settings.plan, progress), None


def _in_part(plan: PlanSettings, memory: int) -> PlanSettings:
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, gpu_memory_bytes=memory))


def _load(prepared: Prepared, spilled: bool) -> dict[str, Any]:
    """Return the predicted seconds of a step in which a spilled job computes, and copies, and its visits of stages."""
    bounds = bounds_of(prepared.plan, prepared.profile, prepared.cluster) if spilled else ()
    directions = [sum(entry.seconds[name] for entry in bounds) for name in (TO_DEVICE, TO_HOST)]
    return {
        "compute_seconds": sum(entry.seconds[COMPUTE] for entry in bounds),
        "copy_seconds": max(directions),
        "visits": len(bounds),
    }


def _spilled(plan: PlanSettings) -> PlanSettings:
    return dataclasses.replace(plan, schedule="spilled")


def _about_spilling(options: str, settings: TrainSettings) -> list[str]:
    """Return the note for jobs with these options, as JSON, for which ``_prepared`` chose stages that take turns."""
    if settings.plan.schedule != "spilled" or json.loads(options).get("schedule") == "spilled":
        return []
    return [
        'the model does not fit its device: the sweep chose schedule = "spilled", whose stages take turns there; with '
        "gpus = 2 or more, it trains as a pipeline over several devices"
    ]


def _checked(
    settings: TrainSettings, check: str, wanted: PrepareTask, prepared: Prepared, notes: list[str]
) -> dict[str, Any] | None:
    """Compare the first steps with plain training; return the error, and add what it says to ``notes``."""

    def events(kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "note":
            notes.append(fields["text"])

    own = _settings(wanted.target, check, Path(wanted.work_dir))
    try:
        check_first(dataclasses.replace(own, plan=settings.plan), prepared, events)
    except AutopipeError as error:
        return described(error)
    return None


def train_lease(task: Any, link: Link) -> dict[str, Any]:
    """Train a job until its target, or until the supervisor requests a stop. ``task``: a ``LeaseTask``.

    Raises: the errors of ``train``.
    """
    wanted: LeaseTask = decoding.decode(LeaseTask, task, "task")
    if wanted.token:
        os.environ[ADDRESS] = wanted.token
    _begin(wanted.devices, Path(wanted.log))
    run, work_dir = RunDirectory(Path(wanted.run_dir)), Path(wanted.work_dir)
    saved, start = checkpoints.steps(run.checkpoints), newest_intact(run)
    if saved and start < 0:
        raise RunError(
            f"all checkpoints are damaged: steps {', '.join(map(str, saved))}",
            where=str(run.checkpoints),
            remedy="remove the folder of the job to train it again, and add --resume",
        )
    resume = start >= 0
    if not resume:
        shutil.rmtree(run.path, ignore_errors=True)  # of a lease that was killed before its first checkpoint
        _copy(Path(wanted.shared), work_dir)
    settings = _settings(wanted.target, wanted.options, work_dir, resume=resume)
    settings = dataclasses.replace(
        settings,
        resume=resume,
        resume_step=start if resume else None,
        run_dir=run.path,
        check_first=False,  # the first job of the structure was compared
    )
    if wanted.steps:
        settings = dataclasses.replace(settings, steps=wanted.steps)
    if settings.checkpoint_every is None and wanted.checkpoint_every:
        settings = dataclasses.replace(settings, checkpoint_every=wanted.checkpoint_every)
    if wanted.evaluate_at_end and not settings.evaluate_every and settings.steps:
        settings = dataclasses.replace(settings, evaluate_every=settings.steps)
    if wanted.spilled and not resume:
        settings = dataclasses.replace(settings, plan=_spilled(settings.plan))
        if wanted.part_bytes:
            settings = dataclasses.replace(settings, plan=_in_part(settings.plan, wanted.part_bytes))
    result = runs.train(settings, _sender(link), stop=link.stop_requested)
    return {"stopped": result.stopped, "step": result.step, "seconds": result.seconds, "steps": result.steps}


def _copy(shared: Path, work_dir: Path) -> None:
    """Copy the prepared artifacts into the work directory of a job. Raises: RunError with the first failure."""
    try:
        shutil.copytree(shared, work_dir, dirs_exist_ok=True, ignore=shutil.ignore_patterns("lock", "*.log"))
    except shutil.Error as error:  # its argument has (source, destination, reason) of each file
        _, where, reason = error.args[0][0]
        remedy = "free space on its disk, or choose another --sweep-dir; then add --resume"
        raise RunError(f"a file of the plan cannot be copied: {reason}", where=str(where), remedy=remedy) from None


def _settings(target: str, options: str, work_dir: Path, *, resume: bool = False) -> TrainSettings:
    """Return the settings of a job. ``resume``: without the options of the plan, which the work directory has."""
    given = option_values.parsed(json.loads(options), TrainOptions)
    given.setdefault("gpus", 1)
    given.setdefault("max_restarts", 3)
    if resume:
        given = {name: value for name, value in given.items() if name not in _OF_THE_PLAN}
    return train_settings(target, given | {"work_dir": work_dir}, launch=launch_settings(given))


def _begin(devices: tuple[int, ...], log: Path) -> None:
    """Prepare this process: its GPUs, and the file for its output."""
    if devices:
        os.environ[VISIBLE] = as_visible(devices, os.environ.get(VISIBLE, ""))
    redirect_output(log)


def _sender(link: Link) -> Events:
    """Return the listener that sends the events of a run to the supervisor; of frequent steps, some."""
    last = 0.0

    def send(kind: str, fields: Mapping[str, Any]) -> None:
        nonlocal last
        if kind not in _SENT:
            return
        if kind == "step":
            if time.monotonic() - last < _STEP_SECONDS:
                return
            last = time.monotonic()
        link.send("event", event=kind, fields=dict(fields))

    return send

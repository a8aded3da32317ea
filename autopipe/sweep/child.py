"""What the processes of a sweep do: prepare the jobs of one structure, or train a job for one lease.

Each process is forked from the server of the ranks, which has imported torch, and forks a server of its own for its
ranks. So the start of a lease imports nothing. Tasks are JSON values.
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

from autopipe.commands import options as table
from autopipe.commands import values
from autopipe.commands.apart.child import Link
from autopipe.commands.apart.errors import described
from autopipe.commands.checking.checking import check_first
from autopipe.commands.locks import only_one
from autopipe.commands.settings import Events, PlanSettings, TrainSettings
from autopipe.commands.steps import Prepared, prepare
from autopipe.commands.training import runs
from autopipe.errors import AutopipeError, DoesNotFitError
from autopipe.ir import decoding
from autopipe.launch.rank.early_server import fork_early
from autopipe.launch.rank.worker import redirect_output
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.job import RunDirectory
from autopipe.sweep.devices import as_visible
from autopipe.sweep.file import OPTIONS

# seconds between two messages about steps: the supervisor shows them, and the run has them all in its metrics
_STEP_SECONDS = 0.1
_SENT = ("progress", "note", "start", "step", "checkpoint", "evaluation", "stopping", "restart", "nonfinite")
_OF_THE_PLAN = frozenset(
    (table.PlanOptions.__optional_keys__ - table.ProfileOptions.__optional_keys__)
    | {"tensor_parallel", "sequence_parallel"}
) - {"ema"}
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(frozen=True, slots=True)
class PrepareTask:
    """The jobs of one structure, which share their profile, their plan and their stage files."""

    target: str
    options: str  # of the first job, as JSON
    work_dir: str
    devices: tuple[int, ...]  # GPUs; () on a CPU
    log: str  # the file for what the user's code prints
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
        notes: list[str] = []
        errors = [_checked(settings, check, wanted, prepared, notes) for check in wanted.checks]
    return {
        "step_seconds": prepared.plan.predicted.step_seconds,
        "batch_size": prepared.plan.batch_size,
        "epoch_steps": prepared.workload.batches.epoch_length,
        "schedule": prepared.plan.schedule,
        "spilled": settings.plan.schedule == "spilled",
        "kind": prepared.profile.device.kind,
        "notes": [*prepared.notes, *(f"warning: {warning}" for warning in prepared.warnings)],
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
        return dataclasses.replace(settings, plan=plan), prepare(plan, progress)


def _spilled(plan: PlanSettings) -> PlanSettings:
    return dataclasses.replace(plan, schedule="spilled")


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
    _begin(wanted.devices, Path(wanted.log))
    run, work_dir = RunDirectory(Path(wanted.run_dir)), Path(wanted.work_dir)
    resume = bool(checkpoints.steps(run.checkpoints))
    if not resume:
        shutil.rmtree(run.path, ignore_errors=True)  # of a lease that was killed before its first checkpoint
        shutil.copytree(wanted.shared, work_dir, dirs_exist_ok=True, ignore=shutil.ignore_patterns("lock", "*.log"))
    settings = _settings(wanted.target, wanted.options, work_dir, resume=resume)
    settings = dataclasses.replace(
        settings,
        resume=resume,
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
    result = runs.train(settings, _sender(link), stop=link.stop_requested)
    return {"stopped": result.stopped, "step": result.step, "seconds": result.seconds, "steps": result.steps}


def _settings(target: str, options: str, work_dir: Path, *, resume: bool = False) -> TrainSettings:
    """Return the settings of a job. ``resume``: without the options of the plan, which the work directory has."""
    given = values.parsed(json.loads(options), OPTIONS)
    given.setdefault("gpus", 1)
    given.setdefault("max_restarts", 3)
    if given["gpus"] == 1:
        given.setdefault("data_reader", "each")  # a single rank: whether the data repeats need not be tested
    if resume:
        given = {name: value for name, value in given.items() if name not in _OF_THE_PLAN}
    return table.train_settings(target, given | {"work_dir": work_dir}, launch=table.launch_settings(given))


def _begin(devices: tuple[int, ...], log: Path) -> None:
    """Prepare this process: the server of its ranks, its GPUs, and the file for its output."""
    if devices:
        os.environ[VISIBLE] = as_visible(devices, os.environ.get(VISIBLE, ""))
    redirect_output(log)
    fork_early()


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

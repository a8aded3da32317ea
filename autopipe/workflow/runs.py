"""The commands that run ranks: ``train`` here; ``check``, ``evaluate`` and ``export`` beside it."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path

from autopipe.errors import RunError
from autopipe.ir import artifact
from autopipe.ir.timeline import Timeline
from autopipe.launch.registry import launch
from autopipe.launch.request import Launch, watchdog_of
from autopipe.runtime import checkpoint as checkpoints
from autopipe.runtime.job import Job, RunDirectory
from autopipe.workflow.checking import batch_size_of, check, check_first, write_run
from autopipe.workflow.finished import evaluate, export, find_run
from autopipe.workflow.listener import Listener
from autopipe.workflow.results import TrainResult
from autopipe.workflow.settings import Events, TrainSettings
from autopipe.workflow.steps import prepare


def train(settings: TrainSettings, events: Events) -> TrainResult:
    """Train: every step that is missing or stale first, then the ranks.

    Raises: RunError where the run directory or a checkpoint does not fit; WorkerError for the first failing rank.
    """

    def progress(what: str, fraction: float) -> None:
        events("progress", {"what": what, "fraction": fraction})

    prepared = prepare(settings.plan, progress)
    for note in prepared.notes:
        events("note", {"text": note})
    for warning in prepared.warnings:
        events("note", {"text": f"warning: {warning}"})
    events("plan", {"plan": prepared.plan})
    if settings.check_first:
        check_first(settings, prepared, events)
    path = _run_path(settings)
    start = _start_step(path, settings.resume)
    steps, epochs = settings.steps or 0, settings.epochs or 0
    job = Job(
        steps=steps,
        epochs=epochs or (0 if steps else 1),
        batch_size=batch_size_of(prepared.workload, prepared.plan) or 0,
        device=prepared.profile.device.kind,
        threads=prepared.profile.device.threads,
        clip_grad_norm=settings.clip_grad_norm,
        checkpoint_every=settings.checkpoint_every,
        evaluate_every=settings.evaluate_every,
        deferred_batch_norm=settings.deferred_batch_norm,
        keep_checkpoints=settings.keep_checkpoints,
        start_step=start,
        record_timeline=settings.record_timeline,
        evaluation_note=prepared.evaluation_note,
    )
    run = write_run(path, job, prepared)
    world = prepared.plan.num_ranks
    listener = Listener(run, events, world)
    events(
        "start",
        {
            "ranks": world,
            "steps": steps,
            "start_step": max(start, 0),
            "batch_size": prepared.plan.batch_size,
            "run_dir": str(path),
        },
    )
    watchdog = watchdog_of(prepared.plan.predicted.step_seconds, settings.launch.watchdog_seconds)
    launch(Launch(run, world, listener, settings.launch, watchdog))
    _write_timeline(run, listener, world)
    seconds = max(listener.ended - listener.started, 0.0)
    return TrainResult(
        losses=tuple(listener.losses),
        steps=len(listener.losses),
        seconds=seconds,
        samples_per_second=listener.samples / seconds if seconds else 0.0,
        ranks=world,
        schedule=prepared.plan.schedule,
        stages=len(prepared.plan.stages),
        run_dir=str(path),
        checkpoint=listener.checkpoint or _latest(run),
        notes=prepared.notes,
    )


def _latest(run: RunDirectory) -> str:
    found = checkpoints.steps(run.checkpoints)
    return str(checkpoints.directory_of(run.checkpoints, found[-1])) if found else ""


def _write_timeline(run: RunDirectory, listener: Listener, world: int) -> None:
    if listener.spans:
        first = min(span.start_seconds for span in listener.spans)
        spans = tuple(
            replace(s, start_seconds=s.start_seconds - first, end_seconds=s.end_seconds - first) for s in listener.spans
        )
        artifact.save(Timeline("measured", world, spans), run.path / "timeline.json")


def _run_path(settings: TrainSettings) -> Path:
    """Return the directory of the run: the one given, the newest where a run is resumed, or a new one."""
    if settings.run_dir is not None:
        return settings.run_dir
    runs = settings.plan.work_dir / "runs"
    if settings.resume:
        return find_run(None, settings.plan.work_dir)
    name = time.strftime("%Y%m%d-%H%M%S")
    for suffix in itertools.chain([""], (f"-{n}" for n in itertools.count(2))):
        path = runs / (name + suffix)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError("the suffixes do not end")


def _start_step(path: Path, resume: bool) -> int:
    """Return the step to go on from, -1 for a start from the beginning.

    Raises: RunError where the directory already holds a run that is not to be resumed, or none that could be.
    """
    found = checkpoints.steps(RunDirectory(path).checkpoints)
    if resume:
        if not found:
            raise RunError(
                f"--resume: there is no checkpoint in {path}",
                where=str(RunDirectory(path).checkpoints),
                remedy="name the run with --run-dir, or train without --resume",
            )
        return found[-1]
    if found:
        raise RunError(
            f"{path} already holds a run (checkpoint of step {found[-1]})",
            remedy="add --resume to go on with it, or choose another --run-dir",
        )
    return -1


__all__ = ["check", "evaluate", "export", "find_run", "train"]

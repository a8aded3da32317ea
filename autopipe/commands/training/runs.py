"""``train``. Also re-exports the other commands that run ranks or use a run: ``check``, ``evaluate``, ``export``."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from autopipe.capture_inputs import optimizer_note
from autopipe.commands.artifact_steps import batch_size_of, prepare
from autopipe.commands.changing import COMPILED, refuse_varying
from autopipe.commands.checking.causes import refusal_of_hooks
from autopipe.commands.checking.checking import check, write_run
from autopipe.commands.checking.first_steps import FirstSteps
from autopipe.commands.evaluation import refuse_impossible
from autopipe.commands.exporting import export
from autopipe.commands.inspecting import history
from autopipe.commands.locks import only_one
from autopipe.commands.loop import refuse_impossible as refuse_impossible_loop
from autopipe.commands.metrics.observers import Observers, hooks_of
from autopipe.commands.metrics.registry import begin as begin_loggers
from autopipe.commands.metrics.registry import refuse_missing
from autopipe.commands.planning.choose import with_averages
from autopipe.commands.prepared import Prepared
from autopipe.commands.settings import CHECKPOINT_SECONDS, Events, TrainSettings
from autopipe.commands.store import Store, Work
from autopipe.commands.stored_runs import evaluate, find_run
from autopipe.commands.training import auditing
from autopipe.commands.training.attempts import Attempts
from autopipe.commands.training.checkpoints import chosen, refuse_full_disk, refuse_lacking_version, refuse_other_model
from autopipe.commands.training.listener import Listener
from autopipe.commands.training.lookahead import covered, first_minibatches, refuse_changed_data
from autopipe.commands.training.measured import Preparation, write_speed, write_timeline
from autopipe.commands.training.resume_options import as_recorded, refuse_other_training, with_own_plan
from autopipe.errors import RunError, counted
from autopipe.launch.remote.rendezvous import Rendezvous
from autopipe.planning.clusters import precision_of
from autopipe.planning.cost.datasheets import utilization
from autopipe.planning.spilled.costs import copied_bytes
from autopipe.report.results import Copied, TrainResult
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.initial import weights_of
from autopipe.runtime.compiled import refuse_uncompilable
from autopipe.runtime.job import Job, RunDirectory, read_rows
from autopipe.runtime.spilling.build import steps_late
from autopipe.verify.restorable import prove_restorable
from autopipe.workers.fork_server import preload

MOST_STEPS = 2**31 - 1
_EVALUATE_LATER = "omit --eval-every; after training, run autopipe export and evaluate the model itself"


def train(
    settings: TrainSettings,
    events: Events,
    rendezvous: Rendezvous | None = None,
    *,
    stop: Callable[[], bool] | None = None,
) -> TrainResult:
    """Train, after running every step that is missing or stale.

    ``rendezvous``: the connections to the processes that a cluster's launcher started; see ``together.lead``.
    ``stop``: polled while the ranks train; once it returns true, the run stops after the current minibatch, with a
    checkpoint. Without ``stop``, signals request that.

    Raises: RunError if the run directory or a checkpoint does not fit; WorkerError for the first failing rank.
    """
    preparation = Preparation(events)

    def progress(what: str, fraction: float) -> None:
        preparation("progress", {"what": what, "fraction": fraction})

    if settings.elastic and settings.launch.name == "env":
        raise RunError(
            "--elastic is not available with --launcher env, where the cluster determines the number of ranks",
            remedy="use --max-restarts instead, or restart the job on fewer ranks with --resume",
        )
    refuse_missing(settings.log)
    settings = _with_places(settings)
    with contextlib.ExitStack() as locks:
        with only_one(settings.plan.work_dir, "prepares a run"):
            path, source = _existing(settings, locks) if settings.resume else (None, None)
            if path is not None and source is not None:
                settings = as_recorded(with_own_plan(settings, RunDirectory(path)), source)
            preload()  # for ranks of this machine, and for audits: a host must not wait for the imports
            accept = None if source is None else partial(refuse_other_model, source)
            prepared = prepare(settings.plan, progress, accept)
            if prepared.plan.num_processes > 1:
                first = first_minibatches(prepared)
                work, again = Work.begin(settings.plan.work_dir, progress), partial(prepare, settings.plan, progress)
                prepared = covered(prepared, first.forms, work, again, steps=settings.steps or 0, progress=progress)
                if not settings.loop:  # its minibatches cannot be read again
                    settings = replace(settings, first_minibatch=first.digest)
            for text in (*prepared.notes, *(f"warning: {warning}" for warning in prepared.warnings)):
                events("note", {"text": text})
            events("plan", {"plan": prepared.plan})
            refuse_impossible_loop(settings, prepared)
            done = 0 if source is None else source.manifest.step
            refuse_full_disk(settings, prepared, path, _checkpoint_every(settings, prepared), done)
            observers = _observers(settings, prepared, events)
            if settings.compile:
                refuse_uncompilable(prepared.plan)
            if settings.evaluate_every:
                refuse_impossible(prepared.workload, prepared.evaluation_note, None, _EVALUATE_LATER)
            if source is not None:
                refuse_lacking_version(source, prepared.plan, prepared.graph)
                for note in refuse_other_training(settings, prepared, source):
                    events("note", {"text": note})
            if note := _of_optimizer(settings, prepared):
                events("note", {"text": note})
            requested = bool(settings.audit_every)
            settings = auditing.scheduled(_varying(settings, prepared), prepared, done, events)
            if settings.init_from is not None and not settings.resume:
                _verify_initial_weights(settings.init_from, prepared, settings.trust, events)
            refuse_changed_data(prepared)
            comparison = _first_steps(settings, prepared, preparation)
            preparation.explain()
            path = path or _new(settings, locks)
            start = -1 if source is None else source.manifest.step
            run = write_run(path, _job(settings, prepared, start, run=RunDirectory(path)), prepared)
        observers.loggers = begin_loggers(settings.log, run, start, prepared.plan)
        listener = _listener(settings, prepared, run, events, comparison)
        result = _launch(settings, prepared, run, start, listener, observers, rendezvous, stop)
        return auditing.with_proofs(result, listener.first_steps, max(start, 0), requested=requested)


def _listener(
    settings: TrainSettings, prepared: Prepared, run: RunDirectory, events: Events, comparison: FirstSteps | None
) -> Listener:
    listener = Listener(run, events, prepared.plan.num_processes, comparison)
    elsewhere = "" if settings.launch.name == "local" else "ranks may run on processors that round differently"
    listener.auditor = auditing.Auditor(run, events, listener.audited, elsewhere)
    listener.auditor.waits = lambda: listener.first_steps is not None and listener.first_steps.running
    return listener


def _varying(settings: TrainSettings, prepared: Prepared) -> TrainSettings:
    """Let a process beside rank 0 read if the model's Python varies. Raises: RunError if it cannot."""
    if not prepared.graph.varies:
        return settings
    if settings.loop:
        refuse_varying(prepared.graph, "the loop over Pipeline.steps does not run it")
    if settings.compile:
        refuse_varying(prepared.graph, COMPILED)
    if settings.audit_every:
        refuse_varying(prepared.graph, "an audit (--audit-every) does not run it")
    if settings.data_reader == "each":
        refuse_varying(prepared.graph, "only one process runs it (omit --data-reader each)")
    if settings.deferred_batch_norm:
        refuse_varying(prepared.graph, "its statistics cannot be deferred (--deferred-batch-norm)")
    hooks = prepared.workload.stepping.has_scheduler or "after_step" in prepared.workload.hooks
    if settings.on_nonfinite == "skip" and hooks:
        refuse_varying(prepared.graph, "it does not see which steps are skipped (--on-nonfinite skip)")
    return replace(settings, data_reader="beside", audit_every=0, replay="all")


def _of_optimizer(settings: TrainSettings, prepared: Prepared) -> str:
    trial = partial(prove_restorable, prepared.workload, _trained(prepared))
    return optimizer_note(Store(settings.plan.work_dir).inputs, trial, unchanged=prepared.unchanged)


def _first_steps(settings: TrainSettings, prepared: Prepared, events: Events) -> FirstSteps | None:
    """Compare the first steps, unless that is done beside the ranks, or the settings say not to: then None."""
    if settings.check_first:
        first = FirstSteps.of(settings, prepared, events)
        first.compare()
        return first
    if refusal := refusal_of_hooks(prepared.workload, prepared.plan, prepared.graph):
        raise refusal  # the comparison would have raised it
    return None


def _observers(settings: TrainSettings, prepared: Prepared, events: Events) -> Observers:
    """Return the observers of the run, without its loggers. Raises: ModelFileError for a hook that is wrong."""
    hooks = hooks_of(settings, prepared.workload)
    if "on_evaluate" in hooks and not settings.evaluate_every:
        label = hooks["on_evaluate"].label
        events("note", {"text": f"{label} is not called: nothing is evaluated without --eval-every"})
    return Observers(hooks, events)


def _with_places(settings: TrainSettings) -> TrainSettings:
    """Return the settings, with every GPU of this machine that ``devices`` does not name excluded.

    Raises: RunError for an index without a GPU.
    """
    settings = replace(settings, plan=replace(settings.plan, elsewhere=settings.launch.name != "local"))
    if not settings.devices:
        return settings
    present = range(torch.cuda.device_count())
    unknown = [index for index in settings.devices if index not in present]
    if unknown:
        raise RunError(
            f"there is no GPU {unknown[0]} on this machine; it has {counted(len(present), 'GPU')}",
            remedy="give the indices of GPUs, counted from 0, or omit devices",
        )
    others = {index for index in present if index not in settings.devices}
    return replace(settings, excluded_devices=tuple(sorted(others | set(settings.excluded_devices))))


def _trained(prepared: Prepared) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    specs = {name: spec for name, spec in prepared.graph.parameters.items() if spec.requires_grad}
    return {name: (spec.concrete({}), getattr(torch, spec.dtype)) for name, spec in specs.items()}


def _verify_initial_weights(path: Path, prepared: Prepared, trust: bool, events: Events) -> None:
    """Compare the initial weights with the model, before ranks start. Raises: RunError, ArtifactError."""
    weights = weights_of(str(path), prepared.graph, prepared.workload, trust=trust)
    events("note", {"text": f"starts from {path}: {counted(len(weights.names), 'tensor')}"})
    if weights.unused:
        text = (
            f"{counted(len(weights.unused), 'tensor')} of {path} {'is' if len(weights.unused) == 1 else 'are'} not used"
        )
        events("note", {"text": f"{text}: {', '.join(weights.unused[:3])}{', ...' if len(weights.unused) > 3 else ''}"})


def _job(settings: TrainSettings, prepared: Prepared, start: int, *, run: RunDirectory) -> Job:
    steps, epochs = settings.steps or 0, settings.epochs or 0
    return Job(
        steps=steps,
        epochs=epochs or (0 if steps else 1),
        batch_size=batch_size_of(prepared.workload, prepared.plan) or 0,
        device=prepared.profile.device.kind,
        threads=prepared.profile.device.threads,
        clip_grad_norm=settings.clip_grad_norm or 0.0,
        checkpoint_every=_checkpoint_every(settings, prepared),
        evaluate_every=settings.evaluate_every,
        audit_every=auditing.interval(settings, prepared),
        audit_offset=settings.audit_offset,
        audit_first=auditing.first(settings, prepared, max(start, 0)),
        first_minibatch=settings.first_minibatch,
        deferred_batch_norm=settings.deferred_batch_norm,
        keep_checkpoints=settings.keep_checkpoints,
        start_step=start,
        evaluate_first=_lacks_evaluation(run, start, settings.evaluate_every),
        excluded_devices=settings.excluded_devices,
        on_nonfinite=settings.on_nonfinite,
        init_from="" if settings.init_from is None else str(settings.init_from.resolve()),
        trust=settings.trust,
        record_timeline=settings.record_timeline,
        measure_memory=settings.measure_memory,
        device_budget_bytes=prepared.device_budget_bytes,
        evaluation_note=prepared.evaluation_note,
        max_shapes=prepared.max_shapes,
        allow_data_dependent=prepared.allow_data_dependent,
        data_reader=settings.data_reader,
        same_data=settings.same_data,
        loop=settings.loop,
        replay=settings.replay,
        learning_rate=settings.new_rate,
        ema=settings.plan.ema or 0.0,
        compile=bool(settings.compile),
        chosen_optimizer=prepared.workload.choice.names,
        initial=prepared.workload.models.initial,
    )


def _lacks_evaluation(run: RunDirectory, start: int, every: int) -> bool:
    """Return whether a run ended after it saved a step, and before the evaluation at that step."""
    if start <= 0 or not every or start % every:
        return False
    return not any("evaluation_loss" in row and row["step"] == start for row in read_rows(run.metrics))


def _copied(settings: TrainSettings, prepared: Prepared, copied: tuple[int, int] | None) -> tuple[Copied, ...]:
    if copied is None:
        return ()
    plan, profile = prepared.plan, with_averages(prepared.profile, prepared.record.request)
    late = steps_late(plan.workload.precision, settings.clip_grad_norm or 0.0, settings.on_nonfinite)
    planned = copied_bytes(plan, profile, late=late)
    return tuple(Copied(to, *sizes) for to, *sizes in zip(("device", "host"), copied, planned, strict=True))


def _checkpoint_every(settings: TrainSettings, prepared: Prepared) -> int:
    """Return the steps between checkpoints: a number of steps and not a time, so that all ranks agree."""
    if settings.checkpoint_every is not None:
        return settings.checkpoint_every
    seconds = prepared.plan.predicted.step_seconds
    return min(max(1, round(CHECKPOINT_SECONDS / seconds)), MOST_STEPS) if seconds else 0


def _launch(
    settings: TrainSettings,
    prepared: Prepared,
    run: RunDirectory,
    start: int,
    listener: Listener,
    observers: Observers,
    rendezvous: Rendezvous | None,
    stop: Callable[[], bool] | None,
) -> TrainResult:
    listener.observers = observers
    attempts = Attempts(
        settings,
        prepared,
        run,
        listener,
        listener.events,
        partial(_job, run=run),
        rendezvous,
        stop,
    )
    begun = history.Begun(attempts.steps, max(start, 0), listener.world_size, prepared.plan.schedule)
    with history.recorded(run, begun, lambda: (listener.done(start), listener.stopped)):
        try:
            attempts.follow(start)
        except BaseException:
            observers.finish(ok=False)
            raise
        observers.finish()
    by_hook = listener.stopped and bool(observers.stopped_by) and attempts.stopped_by == observers.stopped_by
    plan = attempts.prepared.plan
    write_timeline(run, listener, plan.num_processes)
    seconds = max(listener.ended - listener.started, 0.0)
    rate = listener.samples * plan.flops_per_sample / seconds / plan.num_ranks if seconds else 0.0
    profile = attempts.prepared.profile
    return TrainResult(
        losses=tuple(listener.losses[step] for step in sorted(listener.losses)),
        slower=write_speed(run, listener, attempts, seconds).line,
        steps=len(listener.losses),
        seconds=seconds,
        samples_per_second=listener.samples / seconds if seconds else 0.0,
        ranks=plan.num_processes,
        schedule=plan.schedule,
        stages=len(plan.stages),
        run_dir=str(run.path),
        predicted_samples_per_second=plan.predicted.samples_per_second,
        checkpoint=listener.checkpoint or _latest(run),
        stopped=listener.stopped and not by_hook,
        stopped_by=observers.stopped_by if by_hook else "",
        notes=prepared.notes,
        restarts=tuple(attempts.restarts),
        step=listener.done(start),
        skipped=tuple(listener.skipped),
        peaks=tuple(sorted(listener.peaks, key=lambda peak: (peak.stage, peak.rank))),
        copied=_copied(settings, attempts.prepared, listener.copied),
        audits=tuple(listener.audits),
        modules=tuple(stage.modules for stage in plan.stages),
        device_flops_per_second=rate,
        mfu=utilization(rate, profile.device.name, precision_of(profile)) if rate else None,
    )


def _latest(run: RunDirectory) -> str:
    steps = checkpoints.steps(run.checkpoints)
    return str(checkpoints.directory_of(run.checkpoints, steps[-1])) if steps else ""


def _existing(settings: TrainSettings, locks: contextlib.ExitStack) -> tuple[Path, Checkpoint]:
    """Lock the run to resume; return its directory and the checkpoint. Raises: RunError, ArtifactError."""
    path = settings.run_dir or find_run(None, settings.plan.work_dir)
    locks.enter_context(only_one(path, "trains"))
    return path, chosen(RunDirectory(path), settings.resume_step)


def _new(settings: TrainSettings, locks: contextlib.ExitStack) -> Path:
    """Lock and return the directory of a new run: the given one, or one named by the time.

    Raises: RunError if it already contains a run.
    """
    path = settings.run_dir or _named_by_time(settings.plan.work_dir / "runs")
    locks.enter_context(only_one(path, "trains"))
    steps = checkpoints.steps(RunDirectory(path).checkpoints)
    if steps:
        raise RunError(
            f"{path} already contains a run (checkpoint of step {steps[-1]})",
            remedy="add --resume to continue it, or choose another --run-dir",
        )
    return path


def _named_by_time(runs: Path) -> Path:
    name = time.strftime("%Y%m%d-%H%M%S")
    for suffix in itertools.chain([""], (f"-{n}" for n in itertools.count(2))):
        path = runs / (name + suffix)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"{runs} cannot be written: {error.strerror}", remedy="choose a --run-dir") from None
        return path
    raise AssertionError("unreachable: the suffixes are unlimited")


__all__ = ["check", "evaluate", "export", "find_run", "train"]

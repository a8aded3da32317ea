"""The commands that run ranks: check, train, evaluate, export. Each is one function from settings to a result."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autopipe.errors import RunError
from autopipe.ir import artifact
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Instruction
from autopipe.ir.timeline import Span, Timeline
from autopipe.launch.local import LocalLauncher
from autopipe.runtime import checkpoint as checkpoints
from autopipe.runtime.check import Comparison, compare
from autopipe.runtime.job import Job, RunDirectory
from autopipe.runtime.session import Layout
from autopipe.workflow.results import CheckReport, EvaluateResult, ExportResult, ParameterError, TrainResult
from autopipe.workflow.settings import (
    CheckSettings,
    EvaluateSettings,
    Events,
    ExportSettings,
    PlanSettings,
    Progress,
    TrainSettings,
)
from autopipe.workflow.steps import Prepared, prepare
from autopipe.workload import Workload
from autopipe.workload.items import resized


def _write_run(path: Path, job: Job, prepared: Prepared) -> RunDirectory:
    """Put everything that the ranks need into a directory of its own."""
    run = RunDirectory(path)
    run.write(job, prepared.plan, prepared.graph)
    shutil.rmtree(run.stages, ignore_errors=True)
    shutil.copytree(prepared.stages, run.stages, ignore=shutil.ignore_patterns("__pycache__"))
    return run


def _device(prepared: Prepared) -> str:
    return prepared.profile.device.kind


# -- check -------------------------------------------------------------------------------------------------------------


def check(settings: CheckSettings, progress: Progress | None = None) -> CheckReport:
    """Train a few steps plainly and through the plan, and compare every tensor.

    The last minibatch is a sample short, so that an uneven cut is part of it. Ranks are threads: the stage files, the
    schedule and the loop over instructions are those of ``train``.
    """
    prepared = prepare(settings.plan, progress)
    plan, workload = prepared.plan, prepared.workload
    source = workload.items(_batch_size(workload, plan))
    items = list(itertools.islice(source, settings.steps))
    if not items:
        raise RunError(f"the data of {workload.name} is empty")
    samples = workload.num_samples(items[-1])
    if samples > 1:
        items[-1] = resized(items[-1], samples - 1)
    job = Job(
        steps=len(items),
        epochs=0,
        batch_size=plan.batch_size,
        device=_device(prepared),
        threads=prepared.profile.device.threads,
        save=False,
    )
    with tempfile.TemporaryDirectory(prefix="autopipe-check-") as scratch:
        run = _write_run(Path(scratch), job, prepared)
        layout = Layout.of(plan, prepared.graph)
        draws = any(node.num_random for node in prepared.graph.nodes)
        found = compare(workload, run, job, layout, items, draws=draws)
    return _report(found, prepared)


def _batch_size(workload: Workload, plan: Plan) -> int | None:
    """Return the batch size to ask the data for: None where the data decides for itself."""
    return plan.batch_size if workload.takes_batch_size else None


def _report(found: Comparison, prepared: Prepared) -> CheckReport:
    parameters = tuple(ParameterError(d.name, _finite(d.error), d.owner) for d in found.differences)
    return CheckReport(
        equal=found.equal,
        bitwise=found.bitwise,
        max_relative_error=_finite(found.max_relative_error),
        parameters=parameters,
        warnings=(*prepared.warnings, *found.reasons),
        losses=found.losses,
        reference_losses=found.reference_losses,
        notes=prepared.notes,
    )


def _finite(error: float) -> float:
    """Return an error that JSON can hold; what is missing or not a number is as wrong as can be."""
    return min(error, 1e30)


# -- train -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Listener:
    """Takes the ranks' events: keeps what the result needs, writes the metrics, passes on what people see."""

    run: RunDirectory
    events: Events
    world_size: int
    losses: list[float] = field(default_factory=list)
    samples: int = 0
    ready: int = 0
    started: float = 0.0
    ended: float = 0.0
    checkpoint: str = ""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "tick":
            states = [f"waits in {doing}" if waiting else doing for doing, waiting in event["ranks"]]
            self.events("ranks", {"states": states})
        elif kind == "ready":
            self.ready += 1
            if self.ready == self.world_size:
                self.started = time.time()
        elif kind == "step":
            self._step(event)
        elif kind == "checkpoint":
            self.checkpoint = event["path"]
            self.events("checkpoint", {"step": event["step"], "path": event["path"]})
        elif kind == "evaluation":
            self.evaluation = event
            self.events("evaluation", {"loss": event["loss"], "samples": event["samples"]})
        elif kind == "spans":
            self.spans.extend(
                Span(event["rank"], artifact.decode(Instruction, instruction, "span"), start, end)
                for instruction, start, end in event["spans"]
            )

    def _step(self, event: Mapping[str, Any]) -> None:
        self.losses.append(event["loss"])
        self.samples += event["samples"]
        self.ended = event["time"]
        seconds = max(self.ended - self.started, 1e-9)
        line = {
            "step": event["step"],
            "loss": event["loss"],
            "samples": event["samples"],
            "seconds": seconds,
            "samples_per_second": self.samples / seconds,
        }
        with self.run.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.events("step", line)


def train(settings: TrainSettings, events: Events) -> TrainResult:
    """Train: every step that is missing or stale first, then the ranks.

    Raises: RunError where the run directory or a checkpoint does not fit; WorkerError for the first failing rank.
    """

    def progress(what: str, fraction: float) -> None:
        events("progress", {"what": what, "fraction": fraction})

    if settings.precision != "fp32":
        raise RunError(
            f"--precision {settings.precision} is not there yet",
            remedy="train with fp32, or open autocast in the model",
        )
    prepared = prepare(settings.plan, progress)
    for note in prepared.notes:
        events("note", {"text": note})
    for warning in prepared.warnings:
        events("note", {"text": f"warning: {warning}"})
    events("plan", {"plan": prepared.plan})
    path = _run_path(settings)
    start = _start_step(path, settings.resume)
    steps, epochs = settings.steps or 0, settings.epochs or 0
    job = Job(
        steps=steps,
        epochs=epochs or (0 if steps else 1),
        batch_size=_batch_size(prepared.workload, prepared.plan) or 0,
        device=_device(prepared),
        threads=prepared.profile.device.threads,
        clip_grad_norm=settings.clip_grad_norm,
        checkpoint_every=settings.checkpoint_every,
        keep_checkpoints=settings.keep_checkpoints,
        start_step=start,
        record_timeline=settings.record_timeline,
        evaluation_note=prepared.evaluation_note,
    )
    run = _write_run(path, job, prepared)
    world = prepared.plan.num_ranks
    listener = _Listener(run, events, world)
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
    LocalLauncher(run, world, listener).launch("train")
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


def _write_timeline(run: RunDirectory, listener: _Listener, world: int) -> None:
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


def find_run(given: Path | None, work_dir: Path) -> Path:
    """Return the run that is meant: the one given, or the newest of the work directory that has a checkpoint.

    Raises: RunError where there is none.
    """
    if given is not None:
        if not (given / "job.json").is_file():
            raise RunError(f"{given} is no run: it has no job.json", remedy="name a directory that autopipe train made")
        return given
    runs = work_dir / "runs"
    candidates = sorted(path for path in runs.iterdir() if (path / "job.json").is_file()) if runs.is_dir() else []
    with_checkpoint = [path for path in candidates if checkpoints.steps(RunDirectory(path).checkpoints)]
    if not with_checkpoint:
        raise RunError(f"there is no finished run in {runs}", remedy="autopipe train TARGET --gpus N")
    return with_checkpoint[-1]


# -- evaluate and export -----------------------------------------------------------------------------------------------


def evaluate(settings: EvaluateSettings, events: Events | None = None) -> EvaluateResult:
    """Run the evaluation data through the stages of a run, from its newest checkpoint.

    Raises: RunError where the stages cannot evaluate, with the reason.
    """
    run = RunDirectory(find_run(settings.run, settings.work_dir))
    job, plan = run.job(), run.plan()
    if job.evaluation_note:
        raise RunError(
            f"this model cannot be evaluated in stages: {job.evaluation_note}",
            remedy="autopipe export, and evaluate the model itself",
        )
    step = checkpoints.steps(run.checkpoints)[-1:]
    if not step:
        raise RunError(f"there is no checkpoint in {run.checkpoints}", remedy="autopipe train")
    listener = _Listener(run, events or (lambda kind, fields: None), plan.num_ranks)
    start = time.time()
    LocalLauncher(run, plan.num_ranks, listener).launch(
        "evaluate", batch_size=settings.batch_size or 0, evaluation_data=settings.data or ""
    )
    found = listener.evaluation
    return EvaluateResult(
        loss=found["loss"],
        samples=found["samples"],
        batches=found["batches"],
        seconds=time.time() - start,
        run_dir=str(run.path),
        step=step[0],
    )


def export(settings: ExportSettings) -> ExportResult:
    """Write the weights of a checkpoint as one ``state_dict`` that the untouched model loads with ``strict=True``.

    Raises: RunError for another file ending; ArtifactError for a damaged checkpoint.
    """
    import torch
    from safetensors.torch import save_file

    kind = settings.output.suffix
    if kind not in (".safetensors", ".pt"):
        raise RunError(
            f"{settings.output} ends in {kind or 'nothing'}",
            remedy="end it in .safetensors or .pt, which says the format",
        )
    run = RunDirectory(find_run(settings.run, settings.work_dir))
    graph, plan = run.graph(), run.plan()
    steps = checkpoints.steps(run.checkpoints)
    if not steps or (settings.step is not None and settings.step not in steps):
        raise RunError(f"no checkpoint of step {settings.step}; there are {steps}", where=str(run.checkpoints))
    source = checkpoints.Checkpoint(checkpoints.directory_of(run.checkpoints, settings.step or steps[-1]))
    model = Workload.from_spec(plan.workload).build_model()
    state = model.state_dict()
    held = set(source.names)
    names = {key: f"model.{graph.aliases.get(key, key)}" for key in state}
    read = source.read(sorted({name for name in names.values() if name in held}))
    missing = [
        key for key, name in names.items() if name not in read and graph.aliases.get(key, key) in graph.parameters
    ]
    if missing:
        raise RunError(
            f"the checkpoint lacks parameter {missing[0]!r} ({len(missing)} missing)", where=str(source.directory)
        )
    # a buffer that no stage reads is as the model was built
    full = {key: read.get(name, state[key]).contiguous().clone() for key, name in names.items()}
    model.load_state_dict(full, strict=True)
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    temporary = settings.output.with_name(f".{settings.output.name}.tmp")
    if kind == ".pt":
        torch.save(full, temporary)
    else:
        save_file(full, temporary, metadata={"format": "pt"})
    temporary.replace(settings.output)
    return ExportResult(
        path=str(settings.output),
        tensors=len(full),
        bytes=settings.output.stat().st_size,
        step=source.manifest.step,
        run_dir=str(run.path),
    )


__all__ = ["PlanSettings", "check", "evaluate", "export", "find_run", "train"]

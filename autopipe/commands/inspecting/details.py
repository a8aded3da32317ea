"""``show``: everything that the files of one run tell."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopipe.commands.inspecting import history
from autopipe.commands.inspecting.overview import RUNNING, RunFiles, is_step, locate, number, read
from autopipe.commands.settings import WORK_DIRECTORY
from autopipe.errors import ArtifactError, AutopipeError
from autopipe.ir import artifact
from autopipe.ir.plan import Plan
from autopipe.report.results import StagePeak
from autopipe.report.run_results import RunAttempt, RunCheckpoint, RunDetails, RunRow, RunStage
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.checkpoint.manifest import Manifest
from autopipe.runtime.job import Job, RunDirectory, read_rows
from autopipe.workload.target.targets import Target


def show(given: Path | None, work_dir: Path = WORK_DIRECTORY, *, verify: bool = False) -> RunDetails:
    """Return everything about a run. ``verify``: read every file of every checkpoint, and compare its SHA-256.

    Raises: RunError if there is no such run.
    """
    name, path = locate(given, work_dir)
    files = read(path, name)
    run, row, damage = files.directory, files.row, list(files.damage)
    losses, evaluations, audits, peaks = _metrics(run)
    saved = tuple(_checkpoints(run, verify))
    return RunDetails(
        row=row,
        options=_options(files, saved, damage),
        plan=() if files.plan is None else tuple(_stages(files.plan, peaks)),
        predicted_samples_per_second=files.plan.predicted.samples_per_second if files.plan else None,
        losses=losses,
        evaluations=evaluations,
        audits=len(audits),
        unequal_audits=tuple(step for step, equal in audits.items() if not equal),
        checkpoints=saved,
        attempts=tuple(_attempts(files)),
        peaks=peaks,
        damage=tuple(damage),
        next=tuple(_next(row, files.plan, saved, work_dir)),
    )


def _metrics(
    run: RunDirectory,
) -> tuple[dict[int, float | None], dict[int, float | None], dict[int, bool], tuple[StagePeak, ...]]:
    """Return losses by step, evaluations by steps done, whether audits were equal by step, and the latest memory.

    A step that was repeated, after a failure or from an earlier checkpoint, counts once, and the steps that followed it
    before do not count.
    """
    losses: dict[int, float | None] = {}
    evaluations: dict[int, float | None] = {}
    audits: dict[int, bool] = {}
    peaks: dict[tuple[int, int], StagePeak] = {}
    for row in read_rows(run.metrics):
        if is_step(row):
            _discard(losses, row["step"])
            losses[row["step"]] = number(row, "loss")
        elif "evaluation_loss" in row and type(row.get("step")) is int:
            _discard(evaluations, row["step"])
            evaluations[row["step"]] = number(row, "evaluation_loss")
        elif "audit" in row and type(row["audit"]) is int:
            audits[row["audit"]] = row.get("equal") is True
        elif type(row.get("from_step")) is int:
            _discard(losses, row["from_step"])
        elif isinstance(row.get("peak"), dict):
            with contextlib.suppress(TypeError):
                peak = StagePeak(**row["peak"])
                peaks[peak.stage, peak.rank] = peak
    return losses, evaluations, audits, tuple(peaks.values())


def _discard(values: dict[int, float | None], step: int) -> None:
    """Remove the values of a step and of those after it. Keys ascend."""
    while values and next(reversed(values)) >= step:
        values.popitem()


def _stages(plan: Plan, peaks: tuple[StagePeak, ...]) -> Iterator[RunStage]:
    for stage in plan.stages:
        measured = [peak.bytes for peak in peaks if peak.stage == stage.index]
        yield RunStage(
            stage.index, stage.name, stage.ranks, stage.seconds, stage.peak_bytes, max(measured, default=None)
        )


def _options(files: RunFiles, saved: tuple[RunCheckpoint, ...], damage: list[str]) -> dict[str, Any]:
    """Return what decides the training, as the latest command had it."""
    options: dict[str, Any] = {}
    if files.plan is not None:
        plan = files.plan
        spec = dataclasses.asdict(plan.workload)
        wanted = ("target", "arguments", "hooks", "inputs", "seed", "optimizer", "lr", "precision")
        options |= {key: spec[key] for key in wanted}
        options |= {"batch_size": plan.batch_size, "num_microbatches": plan.num_microbatches}
        options |= {"schedule": plan.schedule, "recompute": [stage.recompute for stage in plan.stages]}
        options |= {"tensor_parallel": plan.workload.team}
    if files.job is not None:
        job = dataclasses.asdict(files.job)
        options |= {field.name: job[field.name] for field in dataclasses.fields(Job) if field.name != "initial"}
        options["batch_size"] = options["batch_size"] or (files.plan.batch_size if files.plan else 0)
    if saved:
        with _into(damage):
            manifest = artifact.load(Manifest, Path(saved[-1].path) / "manifest.json", renew="")
            options |= {"epoch": manifest.epoch, "minibatches_of_epoch": manifest.position}
    return options


@contextlib.contextmanager
def _into(damage: list[str]) -> Iterator[None]:
    try:
        yield
    except ArtifactError as error:
        damage.append(f"{error.what} ({error.where})")


def _checkpoints(run: RunDirectory, verify: bool) -> Iterator[RunCheckpoint]:
    with contextlib.suppress(OSError):  # of a directory that cannot be listed, which is in the row
        for step in checkpoints.steps(run.checkpoints):
            path = checkpoints.directory_of(run.checkpoints, step)
            sizes, written = 0, 0.0
            with contextlib.suppress(OSError):
                written = path.stat().st_mtime
                sizes = sum(file.stat().st_size for file in path.iterdir())
            damage = _damage(path) if verify else ""
            yield RunCheckpoint(step, str(path), sizes, written, not damage if verify else None, damage)


def _damage(path: Path) -> str:
    """Return how a checkpoint differs from what was written, or ""."""
    from autopipe.runtime.checkpoint.checkpoint import Checkpoint  # imports torch

    try:
        Checkpoint(path).verify()
    except ArtifactError as error:
        return error.what
    return ""


def _attempts(files: RunFiles) -> Iterator[RunAttempt]:
    groups: list[list[history.Entry]] = []
    for entry in files.entries:
        if isinstance(entry, history.Begun) or not groups:
            groups.append([])
        groups[-1].append(entry)
    for index, group in enumerate(groups):
        begun = group[0]
        if not isinstance(begun, history.Begun):
            continue  # its first line is lost
        ended = next((entry for entry in group if isinstance(entry, history.Ended)), None)
        runs_now = files.row.state == RUNNING and index == len(groups) - 1
        yield RunAttempt(
            began=begun.time,
            ended=ended.time if ended else None,
            state=ended.state if ended else RUNNING if runs_now else history.INTERRUPTED,
            start_step=begun.start_step,
            step=ended.step if ended else None,
            ranks=begun.ranks,
            schedule=begun.schedule,
            host=begun.host,
            pid=begun.pid,
            what=ended.what if ended else "",
            where=ended.where if ended else "",
            remedy=ended.remedy if ended else "",
            restarts=tuple(entry.restart for entry in group if isinstance(entry, history.Restarted)),
        )


def _next(row: RunRow, plan: Plan | None, saved: tuple[RunCheckpoint, ...], work_dir: Path) -> Iterator[str]:
    """Yield the commands that make sense now, the most likely one first."""
    if row.state == RUNNING:
        if row.process:
            yield f"kill -TERM {row.process['pid']} on {row.process['host']} stops it cleanly, with a checkpoint"
        return
    if plan is None:
        return
    path = shlex.quote(row.path)
    usable = [checkpoint for checkpoint in saved if checkpoint.intact is not False]
    step = f" {usable[-1].step}" if usable and usable[-1] is not saved[-1] else ""
    resume = f"autopipe train {_target(plan)} --gpus {plan.num_processes} --resume{step} --run-dir {path}"
    if work_dir != WORK_DIRECTORY:
        resume += f" --work-dir {shlex.quote(str(work_dir))}"
    if not usable:
        yield f"autopipe train {_target(plan)} --gpus {plan.num_processes}"
        return
    if row.state != history.FINISHED:
        yield resume
    yield f"autopipe export {path}{f' --step{step}' if step else ''} -o model.safetensors"
    if row.state == history.FINISHED and row.steps:
        yield f"{resume} --steps {2 * row.steps}"


def _target(plan: Plan) -> str:
    """Return the model as an argument, with a path relative to the current folder if it is in it."""
    text = plan.workload.target
    with contextlib.suppress(AutopipeError, ValueError):
        target = Target.parse(text)
        if target.is_file:
            location = str(Path(target.location).relative_to(Path.cwd()))
            text = f"{location}:{target.attribute}" if target.attribute else location
    arguments = "".join(f" --arg {shlex.quote(f'{name}={value}')}" for name, value in plan.workload.arguments.items())
    return shlex.quote(text) + arguments

"""``runs``: one row for each run of a work directory, from its files. A damaged run is a row with a reason."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from autopipe.commands.inspecting import history
from autopipe.commands.locks import holder
from autopipe.errors import ArtifactError, RunError
from autopipe.ir.plan import Plan
from autopipe.report.run_results import RunRow
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.job import Job, RunDirectory, read_rows

RUNNING, UNREADABLE, UNKNOWN = "running", "unreadable", "unknown"
# enough for the last steps, also behind the rows of an evaluation, an audit and the memory of many stages
_TAIL_BYTES = 1 << 18

T = TypeVar("T")


def run_directories(work_dir: Path) -> dict[str, Path]:
    """Return the runs of a work directory and of its sweeps by name, the newest first."""
    runs = {path.name: path for path in (work_dir / "runs").glob("*") if path.is_dir()}
    of_sweeps = {f"{path.parts[-4]}/{path.parts[-2]}": path for path in (work_dir / "sweeps").glob("*/jobs/*/run")}
    return dict(sorted(runs.items(), reverse=True)) | dict(sorted(of_sweeps.items()))


def without_runs(work_dir: Path, kind: str = "run") -> str:
    """Return the message for a work directory without such a run: runs are where their training was started."""
    runs = work_dir / "runs"
    of = "" if runs.is_absolute() else f" of {Path.cwd()}"
    return f"there is no {kind} in {runs}{of}; runs are in the folder of their training, or in its --work-dir"


def locate(given: Path | None, work_dir: Path) -> tuple[str, Path]:
    """Return name and directory of a run that the user named, by its name or its directory; None: of the newest.

    Raises: RunError if there is no such run, with a similar name.
    """
    known = run_directories(work_dir)
    if given is None:
        if not known:
            raise RunError(without_runs(work_dir), remedy="autopipe train TARGET --gpus N")
        return next(iter(known.items()))
    if (given / "job.json").is_file():
        return next((name for name, path in known.items() if path.resolve() == given.resolve()), str(given)), given
    if str(given) in known:
        return str(given), known[str(given)]
    if given.is_dir():
        raise RunError(
            f"{given} is not a run: it has no job.json",
            remedy="autopipe runs lists those of the work directory; a run elsewhere is named by its directory",
        )
    near = difflib.get_close_matches(given.name, known, n=1)
    raise RunError(
        f"there is no run {str(given)!r} in {work_dir / 'runs'}",
        remedy=f"{f'{near[0]}; ' if near else ''}autopipe runs lists all"
        if known
        else "autopipe train TARGET --gpus N",
    )


def overview(work_dir: Path) -> tuple[RunRow, ...]:
    """Return a row for each run, the newest first."""
    return tuple(read(path, name).row for name, path in run_directories(work_dir).items())


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A run, and the files that ``details`` reads further."""

    row: RunRow
    directory: RunDirectory
    job: Job | None
    plan: Plan | None
    entries: tuple[history.Entry, ...]
    damage: tuple[str, ...]


def read(path: Path, name: str) -> RunFiles:
    """Return what the files of a run tell. A file that is missing or damaged is named in ``reason``."""
    run = RunDirectory(path)
    damage: list[str] = []
    job, plan = _readable(run.job, damage), _readable(run.plan, damage)
    entries = _readable(lambda: history.read(run), damage) or ()
    begun = next((entry for entry in reversed(entries) if isinstance(entry, history.Begun)), None)
    saved = _readable(lambda: checkpoints.steps(run.checkpoints), damage) or []
    newest = saved[-1] if saved else None
    done, last = _readable(lambda: _last_step(run, begun), damage) or (None, None)
    if done is None:
        done = max(job.start_step, 0) if job else newest or 0
    steps = begun.steps if begun else job.steps if job else 0
    state, reason, process = _state(path, entries, bool(steps) and done >= steps and newest == done)
    if damage and state != RUNNING:
        state, reason = UNREADABLE, damage[0]
    row = RunRow(
        name=name,
        path=str(path),
        state=state,
        reason=reason,
        target=plan.workload.target if plan else "",
        schedule=plan.schedule if plan else begun.schedule if begun else "",
        ranks=plan.num_processes if plan else begun.ranks if begun else 0,
        stages=len(plan.stages) if plan else 0,
        step=done,
        steps=steps,
        loss=number(last, "loss"),
        samples_per_second=number(last, "samples_per_second"),
        checkpoint=newest,
        updated=_updated(run),
        process=process,
    )
    return RunFiles(row, run, job, plan, entries, tuple(damage))


def _state(path: Path, entries: tuple[history.Entry, ...], complete: bool) -> tuple[str, str, dict[str, Any]]:
    """Return the state of a run, the reason, and the process that trains it."""
    try:
        process = holder(path)
    except OSError as error:
        return UNKNOWN, f"its lock cannot be read: {error.strerror}", {}
    if process is not None:
        return RUNNING, "", process
    last = next((entry for entry in reversed(entries) if not isinstance(entry, history.Restarted)), None)
    if isinstance(last, history.Ended):
        return last.state, last.what if last.state == history.FAILED else "", {}
    if last is not None:
        return history.INTERRUPTED, "", {}
    if complete:
        return history.FINISHED, "", {}
    return UNKNOWN, "it has no history.jsonl, as runs of earlier versions", {}


def _last_step(run: RunDirectory, begun: history.Begun | None) -> tuple[int | None, Mapping[str, Any] | None]:
    """Return the number of steps done, None without any, and the row of the last one."""
    done, last = None, None
    for row in read_rows(run.metrics, _TAIL_BYTES):
        if is_step(row):
            done, last = row["step"] + 1, row
        elif type(row.get("from_step")) is int:  # a rank failed
            done = row["from_step"]
    with contextlib.suppress(OSError):
        if begun is not None and run.metrics.stat().st_mtime < begun.time:  # it resumed, and no step is done
            done = begun.start_step
    return done, last


def is_step(row: Mapping[str, Any]) -> bool:
    """Return whether a row of the metrics is an optimizer step."""
    return "loss" in row and type(row.get("step")) is int and row["step"] >= 0


def number(row: Mapping[str, Any] | None, key: str) -> float | None:
    """Return a number of a row; None if it has none, or it is not finite."""
    value = row.get(key) if row is not None else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer that no float holds
        return None


def _readable(read_file: Callable[[], T], damage: list[str]) -> T | None:
    """Return what a function reads, or None, with the reason in ``damage``."""
    try:
        return read_file()
    except ArtifactError as error:
        damage.append(error.what)
    except OSError as error:
        damage.append(f"{error.filename} cannot be read: {error.strerror}")
    return None


def _updated(run: RunDirectory) -> float:
    times = [0.0]
    for path in (run.path, run.path / "job.json", run.metrics, run.history, run.checkpoints):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)

"""What is known of each job, and the files of a sweep's folder.

::

    SWEEPDIR/
      sweep.json       every job's record; what --resume reads
      results.csv      the same as a table, one row a job
      shared/DIGEST/   profile, plan and stage files of the jobs with one structure
      jobs/0003-lr=0.001/   work directory and run of a job; output.log
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autopipe.errors import RunError
from autopipe.ir import artifact
from autopipe.report.results import SweepRow
from autopipe.runtime.job import RunDirectory, read_rows
from autopipe.sweep.file import SweepFile, SweepJob
from autopipe.units import finite

WAITING, RUNNING, PAUSED, DONE, FAILED, DROPPED = "waiting", "running", "paused", "done", "failed", "dropped"
ENDED = (DONE, FAILED, DROPPED)
# steps whose mean is the metric ``loss``: the loss of a single minibatch is mostly noise
MEAN_STEPS = 10


@dataclass(slots=True)
class JobRecord:
    """What is known of a job. ``paused``: it waits at a step where the jobs are compared."""

    name: str
    digest: str  # of its target and options
    status: str = WAITING
    rung: int = 0  # the comparisons that it has passed
    step: int = 0  # optimizer steps done
    steps: int = 0  # of the complete job; 0: not known
    loss: float | None = None  # of the last step
    metric: float | None = None
    samples_per_second: float | None = None  # of its last lease
    seconds: float = 0.0  # on devices, with the start of each lease
    leases: int = 0
    devices: str = ""  # on which it runs, or ran last
    error: str = ""


@dataclass(frozen=True, slots=True)
class SweepState:
    """The records of all jobs."""

    jobs: tuple[JobRecord, ...] = ()
    # how many jobs share a device; 0: not decided yet
    jobs_per_device: int = field(default=0, metadata=artifact.OMIT_DEFAULT)
    metric: str = field(default="", metadata=artifact.OMIT_DEFAULT)
    # of [stop]
    at: tuple[int, ...] = field(default=(), metadata=artifact.OMIT_DEFAULT)
    keep: float = field(default=0.0, metadata=artifact.OMIT_DEFAULT)

    @staticmethod
    def of(sweep: SweepFile, records: Sequence[JobRecord], jobs_per_device: int) -> SweepState:
        """Return the state of a sweep."""
        halving = sweep.halving
        at, keep = ((), 0.0) if halving is None else (halving.at, halving.keep)
        return SweepState(tuple(records), jobs_per_device, sweep.metric, at, keep)


@dataclass(frozen=True, slots=True)
class Folder:
    """The paths of a sweep."""

    path: Path

    @property
    def state(self) -> Path:
        """The records of the jobs."""
        return self.path / "sweep.json"

    @property
    def results(self) -> Path:
        """The table of the jobs."""
        return self.path / "results.csv"

    def shared(self, digest: str) -> Path:
        """Return the work directory in which the jobs of a structure are prepared."""
        return self.path / "shared" / digest

    def job(self, job: SweepJob) -> Path:
        """Return the work directory of a job."""
        return self.path / "jobs" / job.folder

    def run(self, job: SweepJob) -> RunDirectory:
        """Return the directory of a job's run."""
        return RunDirectory(self.job(job) / "run")

    def log(self, job: SweepJob) -> Path:
        """Return the file for what a job prints, besides the logs of its ranks."""
        return self.job(job) / "output.log"


def begin(folder: Folder, sweep: SweepFile, *, resume: bool) -> SweepState:
    """Return the state of a sweep: a new one, or with ``resume`` that of the folder. Failed jobs are tried again.

    Raises: RunError if the folder has a sweep and ``resume`` is not given, or has none; or if a job has changed, or how
    the jobs are compared.
    """
    jobs = sweep.jobs
    fresh = [JobRecord(job.name, job.digest) for job in jobs]
    stored: SweepState | None = None
    if folder.state.is_file():
        stored = artifact.load(SweepState, folder.state, renew="autopipe sweep SWEEP.toml with another --sweep-dir")
    if not resume:
        if stored is not None and any(job.leases for job in stored.jobs):
            raise RunError(
                f"{folder.path} already contains a sweep",
                remedy="add --resume to continue it, or choose another --sweep-dir",
            )
        return SweepState.of(sweep, fresh, 0)
    if stored is None:
        raise RunError(f"there is no sweep in {folder.path} to resume", remedy="omit --resume")
    if any(job.leases for job in stored.jobs):
        _refuse_other_comparison(sweep, stored)
    known = {job.name: job for job in stored.jobs}
    numbers = {job.name: number for number, job in enumerate(stored.jobs, 1)}
    for job in jobs:
        number = numbers.get(job.name, job.number)
        if number != job.number and known[job.name].leases:  # its folder has the number
            raise RunError(
                f"{job.name} is job {job.number} of the file, and was job {number} when the sweep trained it",
                where=job.place,
                remedy="keep the order of the jobs, and add new ones at the end; or choose another --sweep-dir",
            )
        if job.name in known and known[job.name].digest != job.digest and known[job.name].leases:
            raise RunError(
                f"the options of {job.name} differ from those with which the sweep trained it",
                where=job.place,
                remedy="restore them, give the job another name, or choose another --sweep-dir",
            )
    begun = {name for name, record in known.items() if record.leases}
    records = [_continued(known[record.name]) if record.name in begun else record for record in fresh]
    return SweepState.of(sweep, records, stored.jobs_per_device if begun else 0)


def _refuse_other_comparison(sweep: SweepFile, stored: SweepState) -> None:
    """Refuse a metric or a ``[stop]`` other than that by which the sweep has compared its jobs.

    Raises: RunError.
    """
    now = SweepState.of(sweep, (), 0)
    for key, before, after in (
        ("metric", stored.metric, now.metric),
        ("stop.at", list(stored.at), list(now.at)),
        ("stop.keep", stored.keep, now.keep),
    ):
        if stored.metric and before != after:
            raise RunError(
                f"{key} is {after!r}, and the sweep began with {before!r}"
                if before and after
                else f"{key} was {'added' if after else 'removed'} after the sweep began",
                where=f"{sweep.path}: {key}",
                remedy="restore it, or choose another --sweep-dir",
            )


def _continued(record: JobRecord) -> JobRecord:
    """Return the record of an earlier invocation, ready to go on."""
    if record.status in (RUNNING, FAILED):
        return dataclasses.replace(record, status=WAITING, error="")
    return record


def save(folder: Folder, current: SweepState, rows: Sequence[SweepRow]) -> None:
    """Write the state and the table, each atomically."""
    artifact.save(current, folder.state)
    artifact.write_text(folder.results, _csv(rows))


def _csv(rows: Sequence[SweepRow]) -> str:
    import pandas as pd

    settings = dict.fromkeys(name for row in rows for name in row.settings)
    table = [
        {
            "job": row.number,
            "name": row.name,
            **{name: row.settings.get(name) for name in settings},
            **{column: getattr(row, column) for column in _COLUMNS},
        }
        for row in rows
    ]
    return str(pd.DataFrame(table).to_csv(index=False))


_COLUMNS = (
    *("status", "step", "steps", "loss", "metric", "samples_per_second", "seconds", "leases", "devices"),
    *("target", "run_dir", "error"),
)


@dataclass(frozen=True, slots=True)
class Metrics:
    """The last figures of a run, from its metrics file."""

    step: int = 0  # optimizer steps done
    loss: float | None = None
    mean: float | None = None  # of the last ``MEAN_STEPS`` losses; None if one of them is not finite
    evaluation: float | None = None


def read_metrics(path: Path) -> Metrics:
    """Return the last figures of a run."""
    losses: dict[int, float] = {}
    evaluation: float | None = None
    for fields in read_rows(path):
        if "loss" in fields:
            losses[fields["step"]] = math.nan if fields["loss"] is None else fields["loss"]
        elif "evaluation_loss" in fields:
            evaluation = fields["evaluation_loss"]
    if not losses:
        return Metrics(evaluation=evaluation)
    last = [losses[step] for step in sorted(losses)[-MEAN_STEPS:]]
    mean = sum(last) / len(last)
    return Metrics(max(losses) + 1, finite(last[-1]), finite(mean), evaluation)

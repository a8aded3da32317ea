"""The jobs of a running sweep: each with its record, its process and its predictions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopipe.report.results import SweepRow
from autopipe.report.text import in_ranges
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.sweep import state
from autopipe.sweep.file import SweepFile, SweepJob
from autopipe.sweep.halving import Halving
from autopipe.sweep.leases import Waiting
from autopipe.sweep.simulator import ModelJob
from autopipe.sweep.state import Folder, JobRecord
from autopipe.sweep.structures import Structure, structures_of
from autopipe.units import finite
from autopipe.workers.worker import Worker

# what a job without a known length counts as: longer than any other, so that it begins first
UNKNOWN_SECONDS = 1e9
# steps of a lease after which its figures count: the first ones are slower
_ENOUGH_STEPS = 3


@dataclass(slots=True)
class Entry:
    """A job of the sweep."""

    job: SweepJob
    record: JobRecord
    structure: Structure
    halving: Halving | None
    folder: Folder
    process: Worker | None = None
    devices: tuple[int, ...] = ()  # on which it runs
    began: float = 0.0  # when its lease began, in monotonic time
    trains: bool = False  # its ranks have started
    trained: float = 0.0  # since when, in monotonic time
    stopping: bool = False  # it was requested to stop
    deaths: int = 0  # of its process, without progress between them
    saved: int = 0  # the step of its last checkpoint at the last of them
    measured: float | None = None  # seconds of a step
    first_step: int = 0  # of the lease

    @property
    def target(self) -> int | None:
        """The step up to which it trains now; None: to the end of its epochs."""
        steps = self.job.options.get("steps")
        if steps is None:
            return None
        return steps if self.halving is None else self.halving.target(self.record.rung, steps)

    def saved_step(self) -> int:
        """Return the step of its newest checkpoint, 0 without one."""
        return max(checkpoints.steps(self.folder.run(self.job).checkpoints), default=0)

    @property
    def step_seconds(self) -> float:
        """The measured seconds of a step, else those of a job with the same structure, else the predicted ones."""
        return self.structure.step_seconds if self.measured is None else self.measured

    @property
    def length(self) -> int:
        """The steps of the complete job; 0: not known."""
        options = self.job.options
        steps: int = options.get("steps") or self.record.steps or options.get("epochs", 1) * self.structure.epoch_steps
        return steps

    def seconds_to(self, step: int) -> float:
        """Return the predicted seconds until a step is done."""
        return max(step - self.record.step, 0) * self.step_seconds

    def seconds_to_end(self) -> float | None:
        """Return the predicted seconds until it is done; None if its length is not known."""
        return self.seconds_to(self.length) if self.length and self.structure.prepared else None

    def waiting(self, now: float) -> Waiting:
        """Return it as the scheduler takes it."""
        remaining = self.remaining
        on = () if self.process is None else self.devices
        # a lease is time of training, not of its start
        ran = now - self.trained if on and self.trains else 0.0
        computes, copies = self.structure.load_of(remaining)
        times = self.job.number, remaining, self.job.devices, on, ran, self.structure.shares
        return Waiting(*times, computes=computes, copies=copies)

    @property
    def remaining(self) -> float:
        """The seconds until its target, or its end."""
        return self.seconds_to(self.target or self.length) if self.length else UNKNOWN_SECONDS

    def as_model(self, *, shares: bool) -> ModelJob | None:
        """Return what the simulation takes: all that is left of the job. None: nothing, or its length is not known.

        A shard of a job is one of its steps; of a job that ``shares`` its device, a visit of a stage.
        """
        number, structure, steps = self.job.number, self.structure, self.length - self.record.step
        if not self.length or steps <= 0:
            return None
        if not shares:
            return ModelJob(number, self.step_seconds, shards=steps, devices=self.job.devices)
        shards = structure.visits * steps
        computes, copies = structure.load_of(self.seconds_to(self.length))
        return ModelJob(number, computes / shards, copies / shards, shards, shares=True)

    def begin(self, process: Worker, on: tuple[int, ...]) -> None:
        """Begin a lease."""
        self.process, self.devices, self.began = process, on, time.monotonic()
        self.trains = self.stopping = False
        self.first_step = self.record.step
        self.record.status, self.record.devices = state.RUNNING, in_ranges(on)
        self.record.leases += 1

    def stop(self) -> None:
        """Request it to stop."""
        assert self.process is not None, "it runs"
        self.stopping = True
        self.process.stop()

    def learn(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Take an event of its run."""
        record = self.record
        if kind == "start":
            self.trains, self.trained = True, time.monotonic()
            record.steps, record.step = self.length or fields["steps"], fields["start_step"]
            self.first_step = record.step
        elif kind == "step":
            record.step, record.loss = fields["step"] + 1, finite(fields["loss"])
            done = record.step - self.first_step
            if done >= _ENOUGH_STEPS:
                record.samples_per_second = fields["samples_per_second"]
                self.measured = self.structure.step_seconds = fields["seconds"] / done

    def end(self, metric: str) -> None:
        """End the lease: release the devices, and read the figures of the run. ``metric``: one of ``METRICS``."""
        metrics = state.read_metrics(self.folder.run(self.job).metrics)
        self.process, self.devices, self.stopping = None, (), False
        record = self.record
        record.seconds += time.monotonic() - self.began
        record.step = metrics.step or record.step
        record.loss = metrics.loss
        record.metric = metrics.mean if metric == "loss" else metrics.evaluation

    def row(self) -> SweepRow:
        """Return it as a row of the table."""
        record = self.record
        return SweepRow(
            number=self.job.number,
            name=self.job.name,
            target=self.job.target,
            settings={name.replace("_", "-"): value for name, value in self.job.settings.items()},
            status=record.status,
            step=record.step,
            steps=record.steps or self.length,
            loss=record.loss,
            metric=record.metric,
            samples_per_second=record.samples_per_second,
            seconds=record.seconds + (time.monotonic() - self.began if self.process is not None else 0.0),
            leases=record.leases,
            devices=record.devices,
            seconds_left=None if record.status in state.ENDED else self.seconds_to_end(),
            run_dir=str(self.folder.run(self.job).path) if record.leases else "",
            error=record.error,
        )


@dataclass(slots=True)
class Board:
    """All jobs of a sweep."""

    folder: Folder
    entries: list[Entry]
    structures: list[Structure] = field(default_factory=list)

    @staticmethod
    def of(sweep: SweepFile, folder: Folder, records: Sequence[JobRecord]) -> Board:
        """Return the board of a sweep. ``records``: one for each job."""
        structures = structures_of(sweep.jobs)
        by_job = {job.number: structure for structure in structures for job in structure.jobs}
        entries = [
            Entry(job, record, by_job[job.number], sweep.halving, folder)
            for job, record in zip(sweep.jobs, records, strict=True)
        ]
        for entry in entries:
            if entry.record.status == state.WAITING and entry.record.leases:
                entry.record.step = entry.saved_step()  # the sweep may have been killed before it noted the step
        return Board(folder, entries, structures)

    def entry(self, job: SweepJob) -> Entry:
        """Return the entry of a job."""
        return self.entries[job.number - 1]

    def entries_of(self, structure: Structure) -> list[Entry]:
        """Return the jobs of a structure."""
        return [self.entry(job) for job in structure.jobs]

    def running(self) -> list[Entry]:
        """Return the jobs that run."""
        return [entry for entry in self.entries if entry.process is not None]

    def unfinished(self) -> list[Entry]:
        """Return the jobs that have not ended."""
        return [entry for entry in self.entries if entry.record.status not in state.ENDED]

    def ready(self) -> list[Entry]:
        """Return the jobs that run or could run."""
        could = (state.WAITING, state.RUNNING)
        return [entry for entry in self.entries if entry.structure.prepared and entry.record.status in could]

    def rows(self) -> list[SweepRow]:
        """Return the rows of all jobs, in the order of the file."""
        return [entry.row() for entry in self.entries]

"""The jobs with one structure: they share their profile, plan and stage files, and the comparison of the first steps.

The learning rate, the seed and the options of the run do not change them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from autopipe.ir import artifact
from autopipe.options.commands import PipelineOptions, options_of
from autopipe.sweep.file import SweepJob
from autopipe.sweep.grid import ARGUMENT

_NOT_PLANNED = {"lr", "seed", "max_shapes"}
_PLANNED = options_of(PipelineOptions).keys() - _NOT_PLANNED
# the options besides those of the plan that determine the comparison of the first steps
_COMPARED = ("check", "clip_grad_norm", "deferred_batch_norm", "compile", "on_nonfinite")


@dataclass(slots=True)
class Structure:
    """The jobs that are prepared together."""

    digest: str
    jobs: list[SweepJob] = field(default_factory=list)
    prepared: bool = False
    deaths: int = 0  # of the process that prepared it
    step_seconds: float = 0.0  # predicted, then as the last of its jobs measured it
    epoch_steps: int = 0  # of one epoch; 0: not known
    spilled: bool = False  # stages take turns on the device, because the model does not fit it
    parts: int = 1  # its plan may use one of so many parts of the memory of a device, if it is spilled
    part_bytes: int | None = None  # of such a part, 0 without a limit; None: its jobs share no device
    compute_seconds: float = 0.0  # of a step whose stages take turns: of the computation, predicted
    copy_seconds: float = 0.0  # and of the copies in the direction that takes longer
    visits: int = 0  # of stages to the device, in a step

    @property
    def first(self) -> SweepJob:
        """The job for which it is prepared."""
        return self.jobs[0]

    def comparisons(self) -> dict[str, list[SweepJob]]:
        """Return the jobs for each kind of comparison with plain training; without those that do not want it."""
        kinds: dict[str, list[SweepJob]] = {}
        for job in self.jobs:
            if job.options.get("check", True):
                kinds.setdefault(json.dumps([job.options.get(name) for name in _COMPARED]), []).append(job)
        return kinds

    def learn(self, figures: dict[str, Any]) -> None:
        """Take the figures that ``child.prepare_jobs`` returns."""
        self.prepared = True
        self.step_seconds = figures["step_seconds"]
        self.epoch_steps = figures["epoch_steps"]
        self.spilled, self.part_bytes = figures["spilled"], figures["part_bytes"]
        self.compute_seconds, self.copy_seconds = figures["compute_seconds"], figures["copy_seconds"]
        self.visits = figures["visits"]

    @property
    def can_share(self) -> bool:
        """Whether its jobs could share a device, with a part of its memory each."""
        return self.spilled and self.visits > 0 and self.first.devices == 1

    @property
    def shares(self) -> bool:
        """Whether its jobs share devices."""
        return self.part_bytes is not None

    def load_of(self, seconds: float) -> tuple[float, float]:
        """Return the seconds of computation and of copies in some seconds of a job whose stages take turns."""
        longer = max(self.compute_seconds, self.copy_seconds)
        if not longer:
            return seconds, 0.0
        return seconds * self.compute_seconds / longer, seconds * self.copy_seconds / longer

    def prepare_part(self, parts: int) -> None:
        """Let it be prepared again, with a part of the memory of a device, if its stages take turns there."""
        self.parts = parts
        self.prepared = self.prepared and not (self.spilled and parts > 1)


def structures_of(jobs: Iterable[SweepJob]) -> list[Structure]:
    """Return the structures of the jobs, in their order."""
    structures: dict[str, Structure] = {}
    for job in jobs:
        planned = {n: v for n, v in job.options.items() if n.startswith(ARGUMENT) or n in _PLANNED}
        digest = artifact.digest((job.target, json.dumps(planned, sort_keys=True)))
        structures.setdefault(digest, Structure(digest)).jobs.append(job)
    return list(structures.values())


def as_text(job: SweepJob) -> str:
    """Return the options of a job as JSON, for a process."""
    return json.dumps(job.given())

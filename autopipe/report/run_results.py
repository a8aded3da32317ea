"""The results of ``runs`` and ``show``. ``--json`` and the tables are made from them. The field names are stable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopipe.report.results import Restart, StagePeak


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run."""

    name: str  # as ``show``, ``eval`` and ``export`` take it
    path: str
    # running, finished, stopped (cleanly, with a checkpoint), failed, interrupted (killed, or by a second Ctrl-C),
    # unreadable (a file is missing or damaged), unknown (an earlier version wrote it)
    state: str
    reason: str  # why it failed, or cannot be read; "" for the other states
    target: str  # the model
    schedule: str
    ranks: int  # of the latest attempt
    stages: int
    step: int  # optimizer steps done
    steps: int  # wanted; 0: as many as the data has
    loss: float | None  # of the last step; None without a step, or if it is not finite
    samples_per_second: float | None  # of the latest command that trained it, on average
    checkpoint: int | None  # the step of the newest; None without one
    updated: float  # when a file was last written, in seconds since 1970
    process: dict[str, Any]  # that trains it: ``pid`` and ``host``; {} if it does not run, or is not known


@dataclass(frozen=True, slots=True)
class RunAttempt:
    """A command that trained a run."""

    began: float  # in seconds since 1970
    ended: float | None  # None: it runs, or was killed
    state: str  # as in ``RunRow``
    start_step: int  # steps done before
    step: int | None  # steps done at its end; None if it was killed
    ranks: int
    schedule: str
    host: str
    pid: int
    what: str  # the error that ended it; "" without one
    where: str
    remedy: str
    restarts: tuple[Restart, ...]


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """A finished checkpoint."""

    step: int
    path: str
    bytes: int
    written: float  # in seconds since 1970
    intact: bool | None  # every file has the SHA-256 that was written; None: not verified
    damage: str = ""  # the difference


@dataclass(frozen=True, slots=True)
class RunStage:
    """One stage of the plan."""

    index: int
    name: str
    ranks: tuple[int, ...]
    seconds: float  # of a microbatch, predicted
    planned_bytes: int  # the peak on each rank
    measured_bytes: int | None  # the largest of its ranks; None if memory was not measured


@dataclass(frozen=True, slots=True)
class RunDetails:
    """The result of ``show``."""

    row: RunRow
    options: dict[str, Any]  # what decides the training: of the model, the plan, and the job
    plan: tuple[RunStage, ...]
    predicted_samples_per_second: float | None
    losses: dict[int, float | None]  # by step, from 0; None: not finite
    evaluations: dict[int, float | None]  # by the number of steps done
    audits: int  # steps that were compared with plain training
    unequal_audits: tuple[int, ...]  # those that differed
    checkpoints: tuple[RunCheckpoint, ...]
    attempts: tuple[RunAttempt, ...]
    peaks: tuple[StagePeak, ...]  # measured memory
    damage: tuple[str, ...]  # what cannot be read
    next: tuple[str, ...]  # commands

"""Audits of a run, in the supervisor's process: their interval, and the comparison in a separate process.

::

    rank 0 --"audit" event--> Auditor: queue --> one process at a time, low priority: verify.plain_step
                                 |                       |
    tick -> poll ----------------+<--- result file ------+     equal: a line; different: AuditError ends the run
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import secrets
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from autopipe.commands.checking.first_steps import FirstSteps
from autopipe.commands.prepared import Prepared
from autopipe.commands.settings import Events, TrainSettings
from autopipe.commands.trusted_code import digest_of_file, users_files
from autopipe.errors import ArtifactError, AuditError, AutopipeError, RunError
from autopipe.launch.rank.worker import redirect_output
from autopipe.report.results import AuditReport, TrainResult
from autopipe.runtime.audit.files import DIFFERENT, EQUAL, LEFT_OUT, AuditFiles, AuditResult, clear_all
from autopipe.runtime.context import RunContext
from autopipe.runtime.job import RunDirectory
from autopipe.units import in_bytes
from autopipe.verify.plain_step import MEMORY_SHARE, audit, memory_bytes
from autopipe.workers.task import Link
from autopipe.workers.worker import Worker, wait_for

# the share of the training time that audits may use, as if they ran on a core that training needs
SHARE = 0.005
# CPU time of a process before its first step, and a lower bound of the disk's write speed
STARTUP_SECONDS, DISK_BYTES_PER_SECOND = 1.0, 2e8
# bytes that an audit writes, as a multiple of the weights: weights and optimizer state (2), before and after the step
_WRITTEN = 6
# the most that the audit of the second step may cost, in seconds or as a share of the predicted time of the run
_FIRST_SECONDS, _FIRST_SHARE = 30.0, 0.05
_LOOK_SECONDS = 0.1
_NICE = 19
MOST_SECONDS = 1800.0
"""The timeout of an audit's process, which runs at the lowest priority and may take long."""


def interval(settings: TrainSettings, prepared: Prepared) -> int:
    """Return the number of steps between audits, 0 for never.

    With ``auto``, audits take at most ``SHARE`` of the predicted training time.

    Raises: RunError if audits are requested and ranks are teams.
    """
    plan = prepared.plan
    if plan.team > 1:
        if settings.audit_every:
            raise RunError(
                f"--audit-every does not work with --tensor-parallel {plan.team}: an optimizer enlarges the rounding "
                "of sums in parts, so one step cannot be proven from its weights",
                remedy="omit --audit-every; autopipe check compares the gradients of every step",
            )
        return 0
    if settings.audit_every is not None:
        return settings.audit_every
    if not plan.predicted.step_seconds:
        return 0
    every = math.ceil(_cost_seconds(prepared) / SHARE / plan.predicted.step_seconds)
    return 0 if settings.steps is not None and every >= settings.steps else every


def first(settings: TrainSettings, prepared: Prepared, start: int) -> int:
    """Return the minibatch that is audited in any case, -1 for none.

    It is the second of a run, in which the optimizer has a state, and the first of one that resumes. The ranks are
    processes then, unlike in the comparison before training. ``start``: the first that the command trains.
    """
    if not settings.check_first or prepared.plan.team > 1 or settings.audit_every == 0:
        return -1
    steps = settings.steps or 0
    share = _FIRST_SHARE * prepared.plan.predicted.step_seconds * (steps - start)
    if _cost_seconds(prepared) > max(_FIRST_SECONDS, share):
        return -1
    return start if start or steps == 1 else 1


def _cost_seconds(prepared: Prepared) -> float:
    """Return an estimate of the time of one audit."""
    plan = prepared.plan
    weights = prepared.graph.parameter_bytes
    plain = plan.num_microbatches * sum(stage.forward_seconds + stage.backward_seconds for stage in plan.stages)
    return STARTUP_SECONDS + 2 * plain + _WRITTEN * weights / DISK_BYTES_PER_SECOND


def memory_shortfall(prepared: Prepared) -> str:
    """Return why the plain step of an audit does not fit into memory while the ranks run, or "" if it fits.

    Always "" on GPUs, where each audit checks the memory itself.
    """
    if prepared.profile.device.kind != "cpu":
        return ""
    needed = memory_bytes(RunContext.of(prepared.plan, prepared.graph))
    weights = prepared.graph.parameter_bytes
    # the ranks' peaks, and the copies of what they write for an audit
    ranks = sum(stage.peak_bytes * stage.replicas for stage in prepared.plan.stages) + _WRITTEN * weights
    free = int(psutil.virtual_memory().available) - ranks
    if needed <= MEMORY_SHARE * free:
        return ""
    return (
        f"audits are skipped: one step of the plain loop needs about {in_bytes(needed)} of memory in addition to the "
        f"ranks, and {in_bytes(max(free, 0))} are free"
    )


def scheduled(settings: TrainSettings, prepared: Prepared, start: int, events: Events) -> TrainSettings:
    """Return the settings with the offset of the audits, without audits if the memory is too small for them.

    The offset is random, so that what repeats with the same period as the audits is not missed by each. ``start``: the
    first minibatch.
    """
    every = interval(settings, prepared)
    wanted = every or first(settings, prepared, start) >= 0
    if wanted and (misfit := memory_shortfall(prepared)):
        events("note", {"text": misfit})
        return dataclasses.replace(settings, audit_every=0)
    if not every:
        return settings
    steps = max((settings.steps or 0) - start, 0) or every
    return dataclasses.replace(settings, audit_offset=(start + secrets.randbelow(min(every, steps))) % every)


def with_proofs(result: TrainResult, first: FirstSteps | None, start: int, *, requested: bool) -> TrainResult:
    """Return the result of a run from ``start`` with the steps that were compared. ``requested``: audits."""
    ended = not (result.stopped or result.stopped_by)
    unproven = requested and ended and bool(result.losses) and not result.audits
    compared, part = (first.steps - start, first.part) if first is not None else (0, "")
    compared = min(max(compared, 0), result.steps)
    return dataclasses.replace(result, compared=compared, compared_with=part, unproven=unproven)


@dataclass(slots=True)
class Auditor:
    """Compares the audited minibatches of a run, one after another."""

    run: RunDirectory
    events: Events
    on_result: Callable[[AuditResult], None]  # takes each result
    elsewhere: str = ""  # see ``plain_step.audit``
    waits: Callable[[], bool] = lambda: False  # whether no audit starts now: another comparison has its memory
    reported: set[str] = field(default_factory=set)  # the notes so far; each is reported once
    most_seconds: float = MOST_SECONDS  # the timeout of a comparison, which is then skipped
    _deadline: float = 0.0
    _waiting: list[tuple[int, float]] = field(default_factory=list)
    _worker: Worker | None = None
    _files: AuditFiles | None = None
    _model: dict[Path, str] = field(default_factory=dict)
    _different: int = -1

    def begin(self) -> None:
        """Begin an attempt, and drop the comparisons of an earlier one."""
        self._different = -1
        self.end()
        self._model = users_files(self.run.plan().workload)

    def add(self, step: int, loss: float) -> None:
        """Queue a minibatch whose state is written."""
        self._waiting.append((step, loss))
        self.poll()

    def poll(self) -> None:
        """Handle the result of a finished comparison, and start the next one. Raises: AuditError."""
        if (worker := self._worker) is not None:
            assert self._files is not None
            list(worker.receive())  # nothing but its end is due
            if worker.ended:
                self._worker = None
                self._take(self._files, worker)
            elif time.monotonic() > self._deadline:
                worker.end()
                self._worker = None
                self._files.clear()
                log = self.run.path / "logs" / "audit.log"
                self.left_out(f"its process did not end within {self.most_seconds:.0f} s; see {log}")
        if self._worker is None and self._waiting and not self.waits():
            self._start(*self._waiting.pop(0))

    def finish(self, stopped: Callable[[], bool]) -> None:
        """Wait for all comparisons, or until a stop is requested. Raises: AuditError."""
        self.poll()
        while self._worker is not None and not stopped():
            wait_for([self._worker], _LOOK_SECONDS)
            self.poll()

    def end(self) -> None:
        """End the current comparison and clear the queue. Results remain, and the files of a step that differs."""
        if self._worker is not None:
            self._worker.end()
        self._worker = self._files = None
        self._waiting.clear()
        clear_all(self.run.path, self._different)

    def failed(self, step: int, reason: str) -> None:
        """End the run: the state of an audited step is not that of one training. Raises: AuditError."""
        result = AuditResult(step, DIFFERENT, reason=reason)
        self.on_result(result)
        raise _difference(result, AuditFiles(self.run.path, step))

    def left_out(self, reason: str) -> None:
        """Report why an audit is skipped, each reason once."""
        text = f"an audit is skipped: {reason}"
        if text not in self.reported:
            self.reported.add(text)
            self.events("note", {"text": text})

    def _edited(self) -> str:
        """Return a note if a user's file was edited since the run began, else "". Ranks run the earlier version."""
        edited = next((path for path, digest in self._model.items() if digest_of_file(path) != digest), None)
        return f"{edited} was edited since the run began" if edited is not None else ""

    def _start(self, step: int, loss: float) -> None:
        files = AuditFiles(self.run.path, step)
        if edited := self._edited():
            self.left_out(edited)
            files.clear()
            return
        files.result.unlink(missing_ok=True)
        task = {"path": str(self.run.path), "step": step, "loss": loss, "elsewhere": self.elsewhere}
        try:
            self._worker = Worker(compare_for_run, task, doing="an audit")
        except RunError as error:
            self.left_out(error.what)
            files.clear()
            return
        self._files = files
        self._deadline = time.monotonic() + self.most_seconds

    def _take(self, files: AuditFiles, worker: Worker) -> None:
        try:
            result = files.load()
        except ArtifactError as unread:
            log = self.run.path / "logs" / "audit.log"
            ended = f"its process ended with code {worker.process.exitcode}"
            self.left_out(f"{ended if worker.died else worker.error or unread}; see {log}")
            files.clear()
            return
        if result.status == DIFFERENT and (edited := self._edited()):
            result = AuditResult(result.step, LEFT_OUT, reason=edited)
        if result.status == DIFFERENT:
            self._different = files.step
            self.on_result(result)
            raise _difference(result, files)
        files.clear()
        if result.status == LEFT_OUT:
            self.left_out(result.reason)
            return
        self.on_result(result)


def _difference(result: AuditResult, files: AuditFiles) -> AuditError:
    """Return the error for a step that differs from the plain loop's."""
    others = f", and {result.differing - 1} more of {result.tensors} tensors differ" if result.differing > 1 else ""
    what = f"{result.name} differs by {result.error:.1e}{others}"
    if not result.differing:
        what = result.reason or "its loss differs"
    return AuditError(
        f"step {result.step + 1} of the run differs from plain training with the same weights and batch: {what}",
        step=result.step,
        where=f"stage {result.stage}; state and batch before that step: {files.before}" if result.differing else "",
        remedy="look for something that changes during the run: an optimizer or hook that acts only after some step, "
        "state of the model file that a fresh process does not have, parameters changed outside of the optimizer; then "
        "continue with --resume, from the newest checkpoint before that step (later ones were set aside)",
    )


def report_of(result: AuditResult) -> AuditReport:
    """Return the entry of an audit in the result of a run."""
    return AuditReport(result.step, result.status == EQUAL, result.bitwise, result.error, result.seconds)


def compare_for_run(task: Mapping[str, Any], link: Link) -> None:
    """Compare one minibatch and write the result, in the process that the auditor starts."""
    os.nice(_NICE)
    path, step = Path(task["path"]), task["step"]
    log = path / "logs" / "audit.log"
    redirect_output(log)
    logging.root.handlers.clear()  # the log of the user's code goes there, too, and not to that of the run
    try:
        result = audit(path, step, task["loss"], task["elsewhere"])
    except BaseException as error:
        traceback.print_exc()
        text = error.what if isinstance(error, AutopipeError) else f"{type(error).__name__}: {error}"
        result = AuditResult(step, LEFT_OUT, reason=f"the plain step failed: {text} (see {log})")
    AuditFiles(path, step).save(dataclasses.replace(result, seconds=time.process_time()))


def fields_of(result: AuditResult) -> Mapping[str, Any]:
    """Return the fields of the event, which are also those of the line in the metrics."""
    return {
        "step": result.step,
        "equal": result.status == EQUAL,
        "bitwise": result.bitwise,
        "max_relative_error": result.error,
    }

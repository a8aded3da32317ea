"""The comparison of the first steps of a new plan with plain training: before the ranks start, or beside them.

::

    known before, or short, or on a GPU     compare -----> ranks start
    long, and it fits beside the ranks      ranks start -----> steps ...
                                            process: compare -----> equal: a line; different: ends the run
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autopipe.commands.checking.causes import hidden_cause, unequal
from autopipe.commands.checking.checking import compare_here, compare_plan, evaluates, steps_to_compare
from autopipe.commands.checking.fitting import need_of, place_of
from autopipe.commands.checking.full_batch import refusal_of_weights
from autopipe.commands.checking.task import Compared, ComparisonTask, Wanted
from autopipe.commands.prepared import Prepared
from autopipe.commands.settings import Events, TrainSettings
from autopipe.commands.users_files import digest_of_file, users_files, versions
from autopipe.errors import RunError, counted
from autopipe.ir.artifact import digest
from autopipe.launch.rank.worker import redirect_output
from autopipe.runtime.job import RunDirectory
from autopipe.workers.task import Link
from autopipe.workers.worker import Worker, needs_worker, wait_for

LONG_SECONDS = 2.0
"""A comparison that is predicted to take longer is made beside the ranks."""
# trainings of a comparison: in stages, plain, and in the order of the plan
_TRAININGS = 3
# the priority of the process beside the ranks: it gets about a third of a core that a rank uses, too
_NICE = 5
_LOOK_SECONDS = 0.1
_MOST_SECONDS = 3600.0
_OMIT = "train without the comparison: --no-check"


@dataclass(slots=True)
class FirstSteps:
    """The comparison for one run. ``compare`` makes it before the ranks start, unless ``beside``."""

    settings: TrainSettings
    prepared: Prepared
    events: Events
    wanted: Wanted
    # the key among the comparisons of the work directory; see ``_mark``
    mark: str
    # it is made while the ranks train
    beside: bool
    # how many steps are proven, now or before
    steps: int = 0
    # the difference that ended the run
    error: Exception | None = None
    _worker: Worker | None = None
    _deadline: float = 0.0

    @staticmethod
    def of(settings: TrainSettings, prepared: Prepared, events: Events) -> FirstSteps:
        """Return the comparison that a run needs; none if an earlier one has the same plan, code and options."""
        steps = steps_to_compare(prepared)
        wanted = Wanted(
            steps=min(steps, settings.steps or steps),
            clip_grad_norm=settings.clip_grad_norm or 0.0,
            deferred_batch_norm=settings.deferred_batch_norm,
            ema=settings.plan.ema or 0.0,
            compile=bool(settings.compile),
            evaluate=evaluates(prepared),
            full_batch="gradient" if prepared.plan.num_microbatches > 1 else "",
        )
        first = FirstSteps(settings, prepared, events, wanted, _mark(prepared, wanted), _is_beside(prepared, wanted))
        if first._marker.is_file() and first.mark in first._marker.read_text(encoding="utf-8").splitlines():
            first.steps, first.beside = wanted.steps, False
        return first

    def compare(self) -> None:
        """Compare, unless that was done before or is done beside the ranks.

        A comparison that does not fit into memory is left out, with a note; the next run tries again.

        Raises: RunError with the cause if they are not equal, or prove nothing.
        """
        count = counted(self.wanted.steps, "step")
        if self.steps:
            self._note(f"the first {count} were compared before, with the same code and options")
            return
        if self.beside:
            return
        self.events("progress", {"what": f"comparing {count} with plain training", "fraction": 0.0})
        if (hidden := hidden_cause(self.prepared)) is not None:
            raise hidden
        self._conclude(compare_plan(self.prepared, self.wanted, instead=_OMIT))

    def begin(self, run: RunDirectory) -> None:
        """Start the process beside the ranks of a run, if the comparison is made there."""
        if not self.beside:
            return
        count = counted(self.wanted.steps, "step")
        self._note(f"comparing {count} with plain training while the ranks train (--no-check omits it)")
        self.prepared = replace(self.prepared, stages=run.stages)  # those of the work directory may change now
        task = {
            "comparison": ComparisonTask.of(self.prepared, self.wanted),
            "log": str(run.path / "logs" / "comparison.log"),
        }
        doing, threads = "comparing with plain training", torch.get_num_threads()
        self._worker = Worker(compare_beside, task, doing=doing, threads=threads, instead=_OMIT)
        self._deadline = time.monotonic() + _MOST_SECONDS

    @property
    def running(self) -> bool:
        """Whether the process beside the ranks compares."""
        return self._worker is not None

    def poll(self) -> None:
        """Take the result of the process beside the ranks, if it has ended. Raises: the difference."""
        if (worker := self._worker) is None:
            return
        list(worker.receive())  # nothing but its end is due
        if not worker.ended:
            if time.monotonic() > self._deadline:
                self.end()
            return
        self._worker = None
        if worker.died:
            self._note(f"not checked: {getattr(worker.error, 'what', worker.error)}")
        elif self.mark != _mark(self.prepared, self.wanted):
            self._note("not checked: a file of the model was edited while it was compared")
        else:
            try:
                if worker.error is not None:
                    raise worker.error
                self._conclude(Compared.decode(worker.value))
            except Exception as error:
                self.error = error
                raise

    def finish(self, stopped: Callable[[], bool], most_seconds: float = _MOST_SECONDS) -> None:
        """Wait for the result, or until ``stopped``, at most this time. Raises: the difference."""
        deadline = time.monotonic() + most_seconds
        self.poll()
        if self._worker is not None:
            self.events("progress", {"what": "waiting for the comparison with plain training", "fraction": 0.0})
        while self._worker is not None and time.monotonic() < deadline and not stopped():
            wait_for([self._worker], _LOOK_SECONDS)
            self.poll()

    def end(self) -> None:
        """End the process beside the ranks, if it compares."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None
            self._note("not checked: the comparison with plain training did not end; the next run repeats it")

    def _conclude(self, compared: Compared) -> None:
        """Record and describe the result. Raises: RunError with the cause of a difference."""
        if compared.note:
            self._note(compared.note)
        result = compared.comparison
        if result is None:
            return
        if result.different:
            raise unequal(result, self.prepared)
        if result.nonfinite:
            if self.settings.on_nonfinite == "stop":
                raise RunError(
                    f"the comparison of the first steps proves nothing: {result.nonfinite}",
                    remedy="inspect the data and the initial weights; to train anyway, use --on-nonfinite warn or skip",
                )
            self._note(f"warning: the comparison of the first steps proves nothing: {result.nonfinite}")
            return
        if (wrong := refusal_of_weights(compared.full_batch)) is not None:
            raise wrong
        with self._marker.open("a", encoding="utf-8") as file:
            file.write(self.mark + "\n")
        kind = "bit for bit" if result.bitwise else f"within {result.max_relative_error:.1e}"
        if result.bitwise and result.orders:
            kind += f", in the plan's order of sums (it differs from one process's by up to {result.order_error:.1e})"
        if self.settings.compile:
            kind += f" (tolerance {result.tolerance:.1e}: --compile rounds differently than eager code)"
        if result.skipped:
            kind += f"; {counted(result.skipped, 'step')} of them skipped, because a gradient overflows in float16"
        if self.prepared.plan.num_microbatches > 1:
            kind += f", over the same {self.prepared.plan.num_microbatches} microbatches"
        for text in result.left_out:
            self._note(text)
        self._note(f"{counted(len(result.losses), 'step')} compared with plain training: equal, {kind}")
        self.steps = len(result.losses)

    @property
    def _marker(self) -> Path:
        return self.settings.plan.work_dir / "checked"

    def _note(self, text: str) -> None:
        self.events("note", {"text": text})


def check_first(settings: TrainSettings, prepared: Prepared, events: Events) -> None:
    """Compare the first steps of a new plan with plain training now, once per plan. Raises: as ``compare``."""
    first = FirstSteps.of(settings, prepared, events)
    first.beside = False
    first.compare()


def compare_beside(task: Any, link: Link) -> dict[str, Any]:
    """Compare in the process beside the ranks. Raises: the hidden cause of a difference."""
    os.nice(_NICE)
    redirect_output(Path(task["log"]))
    decoded = ComparisonTask.decode(task["comparison"])
    prepared = decoded.prepared()
    if (hidden := hidden_cause(prepared)) is not None:
        raise hidden
    return compare_here(prepared, decoded.wanted).encode()


def _is_beside(prepared: Prepared, wanted: Wanted) -> bool:
    """Return whether a comparison takes long, and fits beside the ranks. On a GPU, it would take memory from them."""
    plan = prepared.plan
    if needs_worker(prepared.profile.device.kind):
        return False
    plain = plan.num_microbatches * sum(stage.forward_seconds + stage.backward_seconds for stage in plan.stages)
    if _TRAININGS * wanted.steps * plain < LONG_SECONDS:
        return False
    ranks = sum(stage.peak_bytes * stage.replicas for stage in plan.stages)
    return bool(place_of(prepared, need_of(prepared, wanted.steps), beside=ranks).device)


def _mark(prepared: Prepared, wanted: Wanted) -> str:
    """Return the key of a comparison in the file of earlier ones: everything that determines its result."""
    plan = prepared.plan
    stages = "".join(path.read_text(encoding="utf-8") for path in sorted(prepared.stages.glob("*.py")))
    files = sorted((str(path), content) for path, content in users_files(plan.workload).items())
    named = [(path, digest_of_file(Path(path))) for path in prepared.workload.files]
    subject = digest((stages, files, named, versions(), plan.workload, prepared.profile.device.kind))
    options = wanted.steps, wanted.clip_grad_norm, wanted.deferred_batch_norm, wanted.ema, wanted.compile
    return " ".join(map(str, (subject, plan.digest, plan.num_microbatches, *options)))

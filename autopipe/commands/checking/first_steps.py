"""The comparison of the first steps of a new plan with plain training: before the ranks start, or beside them.

::

    known before, or short, or on a GPU     compare -----> ranks start
    long, and it fits beside the ranks      ranks start -----> first step -----> steps ...
                                            process: compare -----> equal: a line; different: ends the run
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autopipe.capture_inputs import sources, versions
from autopipe.commands.checking.blocks import Blocks
from autopipe.commands.checking.causes import hidden_cause, refusal_of_hooks, unequal
from autopipe.commands.checking.checking import (
    compare_here,
    compare_plan,
    evaluates,
    gradient_of_full_batch,
    steps_to_compare,
)
from autopipe.commands.checking.fitting import need_of, place_of
from autopipe.commands.checking.full_batch import refusal_of_weights
from autopipe.commands.checking.task import Compared, ComparisonTask, Wanted
from autopipe.commands.prepared import Prepared
from autopipe.commands.settings import Events, TrainSettings
from autopipe.commands.store import Store
from autopipe.commands.trusted_code import digest_of_file, users_files
from autopipe.errors import AutopipeError, RunError, counted
from autopipe.ir.artifact import digest
from autopipe.launch.rank.worker import redirect_output
from autopipe.runtime.job import RunDirectory
from autopipe.workers.errors import described, restored
from autopipe.workers.task import Link
from autopipe.workers.worker import Worker, needs_worker, wait_for

LONG_SECONDS = 2.0
"""A comparison that is predicted to take longer is made beside the ranks."""
# trainings of a comparison: in stages, plain, and in the order of the plan
_TRAININGS = 3
# the priority of the process beside the ranks: it gets about a third of a core that a rank uses, too
_NICE = 5
_LOOK_SECONDS = 0.1
# of the memory of the ranks, whose peaks are predicted
_MARGIN = 1.25
_OMIT = "train without the comparison: --no-check"


@dataclass
class FirstSteps:
    """The comparison for one run. ``compare`` makes it before the ranks start, unless ``beside``."""

    settings: TrainSettings
    prepared: Prepared
    events: Events
    wanted: Wanted
    # the user's files -> their digests
    files: dict[str, str]
    # it is made while the ranks train
    beside: bool
    # how many steps are proven, now or before
    steps: int = 0
    # with which blocks, in words, if the comparison with the complete model does not fit; else ""
    part: str = ""
    # the difference that ended the run
    error: Exception | None = None
    # the first step of the run that depends on the result, -1 for all of it
    since: int = -1
    worker: Worker | None = None
    # of the process beside the ranks, until it starts
    _task: dict[str, Any] | None = None
    _scratch: str = ""
    # the file of the run that has ``since`` until the result is known: an interrupted run may be resumed
    _open: Path | None = None

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
            full_batch=gradient_of_full_batch(prepared) if prepared.plan.num_microbatches > 1 else "",
        )
        files = {str(path): content for path, content in users_files(prepared.plan.workload).items()}
        more = (*prepared.workload.files, *map(str, sources(Store(settings.plan.work_dir).inputs)))
        files |= {path: digest_of_file(Path(path)) for path in more}
        beside, complete = _place_and_part(prepared, wanted)
        wanted = replace(wanted, some_blocks=beside and not complete)
        first = FirstSteps(settings, prepared, events, wanted, files, beside)
        first._look_up(complete=complete)
        return first

    def _look_up(self, *, complete: bool) -> None:
        """Find an earlier comparison. One with some blocks counts if a new one would not be ``complete`` either."""
        lines = self._marker.read_text(encoding="utf-8").splitlines() if self._marker.is_file() else []
        parts = [line.removeprefix(self._mark).strip() for line in lines if line.startswith(self._mark)]
        if parts and ("" in parts or not complete):
            self.steps, self.part, self.beside = self.wanted.steps, "" if "" in parts else parts[-1], False

    def compare(self) -> None:
        """Compare, unless that was done before or is done beside the ranks.

        A comparison that does not fit into memory is left out, with a note; the next run tries again.

        Raises: RunError with the cause if they are not equal, or prove nothing.
        """
        count = counted(self.wanted.steps, "step")
        if self.steps:
            part = f", and {self.part} of the model" if self.part else ""
            self._note(f"the first {count} were compared before, with the same code and options{part}")
            return
        if self.beside:
            if refusal := refusal_of_hooks(self.prepared.workload, self.prepared.plan, self.prepared.graph):
                raise refusal  # ranks would fail at it
            return
        self.events("progress", {"what": f"comparing {count} with plain training", "fraction": 0.0})
        if (hidden := hidden_cause(self.prepared)) is not None:
            raise hidden
        self._conclude(compare_plan(self.prepared, self.wanted, instead=_OMIT))

    def begin(self, run: RunDirectory, start: int) -> None:
        """Prepare the process beside the ranks of a run, if the comparison is made there. ``start``: as of a job."""
        if not self.beside:
            return
        count = counted(self.wanted.steps, "step")
        self._note(f"comparing {count} with plain training while the ranks train (--no-check omits it)")
        self._scratch = tempfile.mkdtemp(prefix="autopipe-check-")
        comparison = ComparisonTask.of(self.prepared, replace(self.wanted, scratch=self._scratch))
        # stages of the work directory may change now
        comparison["stages"] = shutil.copytree(self.prepared.stages, Path(self._scratch) / "stages").as_posix()
        self._task = {"comparison": comparison, "log": str(run.path / "logs" / "comparison.log")}
        self._open = run.path / "uncompared"
        with contextlib.suppress(OSError, ValueError):
            start = min(start, int(self._open.read_text(encoding="utf-8")))
        self.since = start
        self._open.write_text(str(start), encoding="utf-8")

    @property
    def running(self) -> bool:
        """Whether the process beside the ranks compares, or will."""
        return self.worker is not None or self._task is not None

    def poll(self, *, trains: bool = True) -> None:
        """Take the result of the process beside the ranks, if it has ended. Raises: the difference.

        ``trains``: whether a step has ended. The process starts then: it would delay the first one.
        """
        if trains and self._task is not None:
            self._start(self._task)
        if (worker := self.worker) is None:
            return
        list(worker.receive())  # nothing but its end is due
        if not worker.ended:
            return
        self.worker = None
        self._clear()
        edited = next((path for path, content in self.files.items() if digest_of_file(Path(path)) != content), "")
        if edited:
            self._note(f"not checked: {edited} was edited since the run began")
        elif worker.error is not None:  # of the process: a difference is a result
            self._note(f"not checked: {getattr(worker.error, 'what', worker.error)}")
        else:
            try:
                if "hidden" in worker.value:
                    raise restored(worker.value["hidden"])
                self._conclude(Compared.decode(worker.value))
            except AutopipeError as error:
                self.error = error
                raise

    def finish(self, stopped: Callable[[], bool], most_seconds: float = math.inf) -> None:
        """Wait for the result, or until ``stopped``, at most this time. Raises: the difference."""
        deadline = time.monotonic() + most_seconds
        self.poll(trains=not stopped())
        if self.worker is not None:
            self.events("progress", {"what": "waiting for the comparison with plain training", "fraction": 0.0})
        while self.worker is not None and time.monotonic() < deadline and not stopped():
            wait_for([self.worker], _LOOK_SECONDS)
            self.poll()

    def end(self) -> None:
        """End the process beside the ranks, if it compares or would."""
        if self.running:
            self._note("not checked: the comparison with plain training did not end; the next run repeats it")
        if self.worker is not None:
            self.worker.end()
            self.worker = None
        self._clear()

    def _start(self, task: dict[str, Any]) -> None:
        self._task = None
        doing, threads = "comparing with plain training", torch.get_num_threads()
        try:
            self.worker = Worker(compare_beside, task, doing=doing, threads=threads, instead=_OMIT)
        except (RunError, OSError) as error:
            self._note(f"not checked: {getattr(error, 'what', error)}")
            self._clear()

    def _clear(self) -> None:
        self._task = None
        shutil.rmtree(self._scratch, ignore_errors=True)

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
            # ranks stop by themselves, and the complete model may be finite
            if self.settings.on_nonfinite == "stop" and not self.beside and not compared.part:
                raise RunError(
                    f"the comparison of the first steps proves nothing: {result.nonfinite}",
                    remedy="inspect the data and the initial weights; to train anyway, use --on-nonfinite warn or skip",
                )
            self._note(f"warning: the comparison of the first steps proves nothing: {result.nonfinite}")
            return
        if (wrong := refusal_of_weights(compared.full_batch)) is not None:
            raise wrong
        self.steps, self.part = len(result.losses), compared.part
        self._record()
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
        self._note(f"{counted(self.steps, 'step')} compared with plain training: equal, {kind}")

    def _record(self) -> None:
        """Store that the steps are equal, so that they are not compared again."""
        if self._open is not None:
            self._open.unlink(missing_ok=True)
        try:
            with self._marker.open("a", encoding="utf-8") as file:
                file.write(f"{self._mark} {self.part}".strip() + "\n")
        except OSError as error:
            self._note(f"the next run compares again: {self._marker} cannot be written ({error.strerror})")

    @functools.cached_property
    def _mark(self) -> str:
        """The key of the comparison in the file of earlier ones: everything that determines its result."""
        plan, wanted = self.prepared.plan, self.wanted
        stages = "".join(path.read_text(encoding="utf-8") for path in sorted(self.prepared.stages.glob("*.py")))
        files, kind = sorted(self.files.items()), self.prepared.profile.device.kind
        subject = digest((stages, files, versions(), plan.workload, kind))
        options = wanted.steps, wanted.clip_grad_norm, wanted.deferred_batch_norm, wanted.ema, wanted.compile
        return " ".join(map(str, (subject, plan.digest, plan.num_microbatches, *options)))

    @property
    def _marker(self) -> Path:
        return self.settings.plan.work_dir / "checked"

    def _note(self, text: str) -> None:
        self.events("note", {"text": text})


def check_first(settings: TrainSettings, prepared: Prepared, events: Events) -> FirstSteps:
    """Compare the first steps of a new plan with plain training now, once per plan. Raises: as ``compare``."""
    first = FirstSteps.of(settings, prepared, events)
    first.beside = False
    first.compare()
    return first


def compare_beside(task: Any, link: Link) -> dict[str, Any]:
    """Compare in the process beside the ranks. Returns a ``Compared``, or the error for a hidden cause as "hidden"."""
    os.nice(_NICE)
    redirect_output(Path(task["log"]))
    decoded = ComparisonTask.decode(task["comparison"])
    prepared = decoded.prepared()
    if (hidden := hidden_cause(prepared)) is not None:
        return {"hidden": described(hidden)}
    return compare_here(prepared, decoded.wanted).encode()


def _place_and_part(prepared: Prepared, wanted: Wanted) -> tuple[bool, bool]:
    """Return whether the comparison is made beside the ranks, because it takes long, and whether with all blocks.

    On a GPU, it would take memory from the ranks, and this process does not ask how much there is.
    """
    plan = prepared.plan
    if needs_worker(prepared.profile.device.kind):
        return False, False
    need = need_of(prepared, wanted.steps)
    fits = bool(place_of(prepared, need).device)
    plain = plan.num_microbatches * sum(stage.forward_seconds + stage.backward_seconds for stage in plan.stages)
    if _TRAININGS * wanted.steps * plain < LONG_SECONDS:
        return False, fits
    ranks = round(_MARGIN * sum(stage.peak_bytes * stage.replicas for stage in plan.stages))
    if place_of(prepared, need, beside=ranks).device:
        return True, True
    if fits and (prepared.graph.varies or Blocks(plan, prepared.graph).fitting(prepared, need, ranks) is None):
        return False, True
    return True, False  # what fits then, if anything

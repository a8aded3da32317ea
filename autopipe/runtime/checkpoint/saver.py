"""``Saver``: writes the checkpoint of a rank in the background while training continues.

::

    training thread   ... | copy | next minibatches ...            | copy | ...
    writing thread               | write, fsync | (rank 0: wait for the others, rename, latest, retention)

At most one checkpoint is in flight: a second one waits for the first. The replicas of a stage write a part of it each.
A description next to each file tells rank 0 that the file is written, so training exchanges nothing. If writing fails,
the rank fails at its next minibatch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autopipe.errors import ArtifactError
from autopipe.runtime.after_step.average import PREFIX
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.checkpoint import state
from autopipe.runtime.checkpoint.directory import Part
from autopipe.runtime.checkpoint.manifest import Manifest, StageState
from autopipe.runtime.checkpoint.members import sliced
from autopipe.runtime.checkpoint.proof import live_tensors, refuse_missing, sums_of
from autopipe.runtime.checkpoint.sharing import bits, checksums, of_member, share
from autopipe.runtime.checkpoint.snapshot import Snapshot
from autopipe.runtime.step.stepper import Stepper
from autopipe.stage import Stage

POLL_SECONDS = 0.01
FINISH_SECONDS = 5.0
"""How long a rank that fails waits for the checkpoint in flight."""


class Saver:
    """Writes the checkpoints of one rank.

    Args:
        directory: of the checkpoints.
        writers: for each stage, how many ranks write a part of it.
        keep: how many of the newest checkpoints are kept; 0 keeps all.
        leads: this rank finishes a checkpoint when all parts are written.
        timeout_seconds: how long it waits for them. A rank that failed is detected elsewhere long before.

    """

    def __init__(
        self, directory: Path, writers: Sequence[int], *, keep: int, leads: bool, timeout_seconds: float = 600.0
    ) -> None:
        self.directory, self.writers, self.keep, self.leads = directory, tuple(writers), keep, leads
        self.timeout_seconds = timeout_seconds
        self._thread: threading.Thread | None = None
        self._step = -1
        self._failure: BaseException | None = None
        self._finished: list[tuple[int, Path]] = []
        self._refusals: dict[str, bool] = {}
        self._cancelled = threading.Event()
        self._snapshots: dict[int, Snapshot] = {}
        self._initial: dict[int, dict[str, Any]] = {}
        self._verified: set[int] = set()

    def watch(self, stepper: Stepper) -> None:
        """Record what the hooks built, before anything is stepped or restored, and verify each stage's first step.

        Raises: RunError if a checkpoint cannot hold the state of an optimizer or a scheduler: now, or at that step.
        """
        for stage in stepper.runners:
            training = stepper.training(stage)
            if training is not None:
                self._initial[stage] = training.initial()

        def verify_first_step(stage: int) -> None:
            training = stepper.training(stage)
            if training is not None and stage not in self._verified:
                self._verified.add(stage)
                training.state(str(stage), self._initial[stage])

        stepper.after_step = verify_first_step

    def for_directory(self, directory: Path) -> Saver:
        """Return a saver that writes the same state into another directory and keeps everything it writes."""
        saver = Saver(directory, self.writers, keep=0, leads=self.leads, timeout_seconds=self.timeout_seconds)
        saver._initial = self._initial
        return saver

    def save(self, manifest: Manifest, stepper: Stepper, places: Mapping[int, int], *, pinned: bool = False) -> None:
        """Copy the state of some stages into the buffers of the previous checkpoint, and start to write it.

        ``places``: which of the writers of each of these stages this rank is.

        Raises: the failure of the previous checkpoint; RunError for a state that a checkpoint cannot hold.
        """
        self.wait()
        parts = []
        for stage, writer in places.items():
            own = stage in stepper.shards  # the optimizer state of this replica alone
            stored, of_optimizer = StageState(tuple(stepper.stepped(stage))), dict[str, torch.Tensor]()
            code = stepper.runners[stage].stage
            replica, member = divmod(writer, code.TEAM)
            if (training := stepper.training(stage)) is not None:
                place = f"{stage}.{replica}" if own else str(stage)
                stored, of_optimizer = training.state(place, self._initial[stage])
            averages = {} if stepper.averages is None else stepper.averages.of(stage)
            tensors = state.collect(stepper.runners[stage], stepper.owned(stage))
            tensors.update({f"{PREFIX}{name}": tensor for name, tensor in averages.items()})
            tensors.update({} if own else of_optimizer)
            live = live_tensors(stepper.runners[stage], stepper.owned(stage), averages)
            refuse_missing(tensors, live, stage)
            counted: dict[str, int] = {}
            tensors, slices = sliced(code, tensors)
            if (num_writers := self.writers[stage]) > 1:
                counters = state.counters(stepper.runners[stage])
                cut = {name: tensor for name, tensor in tensors.items() if name in slices}
                tensors = {name: tensor for name, tensor in tensors.items() if name not in slices}
                counted = checksums({name: tensor for name, tensor in tensors.items() if name not in counters})
                counted |= {of_member(name, member): total for name, total in checksums(cut).items()}
                tensors = share(tensors, writer, num_writers, counters)
                tensors.update(share(cut, replica, num_writers // code.TEAM))
                slices = {name: part for name, part in slices.items() if name in tensors}
            if own:
                of_optimizer, parts_of_member = sliced(code, of_optimizer)
                slices |= parts_of_member
                tensors |= {name: t for name, t in of_optimizer.items() if not member or name in parts_of_member}
            snapshot = self._snapshots.setdefault(stage, Snapshot(pinned=pinned))
            sums = sums_of(tensors, live, training)
            snapshot.take(tensors)
            if snapshot.refusal:
                self._refusals.setdefault(snapshot.refusal, False)
            parameters = stepper.parameters(stage)
            ties = {
                _of_member(code, tie.parameter): bits(parameters[tie.parameter])
                for tie in stepper.ties.moving
                if tie.parameter in parameters
            }
            training_state = stored if (own and not member) or writer == 0 else StageState()
            parts.append(Part(stage, snapshot, training_state, ties, slices, writer, counted, sums))
        self.write(manifest, parts)

    def write(self, manifest: Manifest, parts: Sequence[Part]) -> None:
        """Start to write. The snapshots must not change until ``wait`` has returned.

        Raises: the failure of the previous checkpoint.
        """
        self.wait()
        self._step = manifest.step
        self._thread = threading.Thread(target=self._run, args=(manifest, parts), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is in flight. Raises: the failure of writing."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_if_failed()

    def wait_unless(self, given_up: Callable[[], bool]) -> bool:
        """Wait until nothing is in flight. Cancel and return False if ``given_up`` returns True meanwhile.

        Raises: the failure of writing.
        """
        while self._thread is not None and self._thread.is_alive():
            if given_up():
                self.cancel()
                return False
            self._thread.join(POLL_SECONDS)
        self.wait()
        return True

    def raise_if_failed(self) -> None:
        """Raise the failure of writing, if there was one."""
        if self._failure is not None:
            raise self._failure

    def finished(self) -> list[tuple[int, Path]]:
        """Return the checkpoints finished since the last call, as (step, path). Empty on every rank but 0."""
        finished, self._finished = self._finished, []
        return finished

    def refusals(self) -> list[str]:
        """Return why copies are not in page-locked memory although that was requested, each reason once."""
        reasons = [reason for reason, reported in self._refusals.items() if not reported]
        self._refusals = dict.fromkeys(self._refusals, True)
        return reasons

    def wait_up_to(self, seconds: float = FINISH_SECONDS) -> None:
        """Wait up to ``seconds`` for the checkpoint in flight, until rank 0 has finished it too."""
        if self._thread is None:
            return
        self._thread.join(seconds)
        final = checkpoints.directory_of(self.directory, self._step)
        polls = int(seconds / POLL_SECONDS)
        while self._failure is None and not final.is_dir() and (polls := polls - 1) > 0:
            self._cancelled.wait(POLL_SECONDS)

    def cancel(self) -> None:
        """Stop waiting for other ranks: this one has failed."""
        self._cancelled.set()

    def _run(self, manifest: Manifest, parts: Sequence[Part]) -> None:
        try:
            temporary = checkpoints.unfinished(self.directory, manifest.step, manifest.plan_digest)
            for part in parts:
                checkpoints.write_part(temporary, part, self.writers)
            if self.leads and self._all_written(temporary):
                path = checkpoints.finish(self.directory, temporary, self.writers, manifest, self.keep)
                self._finished.append((manifest.step, path))
        except BaseException as error:
            self._failure = error

    def _all_written(self, temporary: Path) -> bool:
        """Wait for the parts of the other ranks; False if cancelled. Raises: ArtifactError if one times out."""
        missing = checkpoints.descriptions(temporary, self.writers)
        polls = int(self.timeout_seconds / POLL_SECONDS)
        while polls := polls - 1:
            missing = {place: path for place, path in missing.items() if not path.is_file()}
            if not missing:
                return True
            if self._cancelled.wait(POLL_SECONDS):
                return False
        stage, writer = min(missing)
        raise ArtifactError(
            f"stage {stage} has not written its part of the checkpoint after {self.timeout_seconds:.0f} s: "
            f"{checkpoints.file_name(stage, writer, self.writers)} is missing",
            where=str(temporary),
            remedy="every rank must see the same run directory: put it on a shared disk (--run-dir)",
        )


def _of_member(code: Stage, parameter: str) -> str:
    """Return the name of a tied parameter, of which each member of a team may have another part."""
    return f"{parameter}@{code._autopipe_team.member}" if parameter in code.SHARDS else parameter

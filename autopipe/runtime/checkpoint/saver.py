"""``Saver``: writes a rank's part of a checkpoint while training goes on.

::

    training thread   ... | copy | next minibatches ...            | copy | ...
    writing thread               | write, fsync | (rank 0: await the others, rename, latest, retention)

At most one checkpoint is in flight: a second one waits for the first. Ranks tell rank 0 that they have written by the
description that each stage puts beside its file, so nothing is exchanged in training's path. A failure while writing is
the rank's failure, raised at its next minibatch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autopipe.errors import ArtifactError
from autopipe.runtime.after_step.average import PREFIX
from autopipe.runtime.checkpoint import checkpoint as checkpoints
from autopipe.runtime.checkpoint import state
from autopipe.runtime.checkpoint.snapshot import Snapshot
from autopipe.runtime.step.stepper import Stepper

LOOK_SECONDS = 0.01
LINGER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Part:
    """What one stage puts into a checkpoint. ``snapshot``: its tensors, copied. The rest: as in ``StageFile``."""

    stage: int
    snapshot: Snapshot
    training: checkpoints.StageState
    ties: dict[str, int] = field(default_factory=dict)


class Saver:
    """One rank's. ``leads``: it finishes the checkpoint once all ``num_stages`` stages have written.

    ``patience_seconds``: how long it waits for them; a rank that failed is noticed elsewhere long before.
    """

    def __init__(
        self, directory: Path, num_stages: int, *, keep: int, leads: bool, patience_seconds: float = 600.0
    ) -> None:
        self.directory, self.num_stages, self.keep, self.leads = directory, num_stages, keep, leads
        self.patience_seconds = patience_seconds
        self._thread: threading.Thread | None = None
        self._step = -1
        self._failure: BaseException | None = None
        self._finished: list[tuple[int, Path]] = []
        self._abandoned = threading.Event()
        self._snapshots: dict[int, Snapshot] = {}
        self._initial: dict[int, dict[str, Any]] = {}
        self._stored: set[int] = set()

    def watch(self, stepper: Stepper) -> None:
        """Note what the hooks have built, before anything is stepped or restored, and look at each stage's first step.

        Raises: RunError where a checkpoint cannot hold the state of an optimizer or a scheduler: now, or at that step.
        """
        for stage in stepper.runners:
            training = stepper.training(stage)
            if training is not None:
                self._initial[stage] = training.initial()

        def look(stage: int) -> None:
            training = stepper.training(stage)
            if training is not None and stage not in self._stored:
                self._stored.add(stage)
                training.state(stage, self._initial[stage])

        stepper.after_step = look

    def beside(self, directory: Path) -> Saver:
        """Return a saver into another directory, of what this one watches; it keeps all that it writes."""
        saver = Saver(directory, self.num_stages, keep=0, leads=self.leads, patience_seconds=self.patience_seconds)
        saver._initial = self._initial
        return saver

    def save(
        self, manifest: checkpoints.Manifest, stepper: Stepper, stages: Sequence[int], *, pinned: bool = False
    ) -> None:
        """Copy what ``stages`` hold, over the copies of the checkpoint before, and begin to write it.

        Raises: what writing the one before has failed with; RunError for a state that a checkpoint cannot hold.
        """
        self.wait()
        parts = []
        for stage in stages:
            owned = stepper.owned(stage)
            stored, tensors = checkpoints.StageState(tuple(owned)), dict[str, torch.Tensor]()
            if (training := stepper.training(stage)) is not None:
                stored, tensors = training.state(stage, self._initial[stage])
            snapshot = self._snapshots.setdefault(stage, Snapshot(pinned=pinned))
            averages = {} if stepper.averages is None else stepper.averages.of(stage)
            tensors.update({f"{PREFIX}{name}": tensor for name, tensor in averages.items()})
            snapshot.take({**state.collect(stepper.runners[stage], owned), **tensors})
            held = stepper.parameters(stage)
            ties = {
                tie.parameter: state.bits(held[tie.parameter]) for tie in stepper.ties.moving if tie.parameter in held
            }
            parts.append(Part(stage, snapshot, stored, ties))
        self.write(manifest, parts)

    def write(self, manifest: checkpoints.Manifest, parts: Sequence[Part]) -> None:
        """Begin to write. The snapshots must stay as they are until ``wait`` has returned.

        Raises: what writing the one before has failed with.
        """
        self.wait()
        self._step = manifest.step
        self._thread = threading.Thread(target=self._run, args=(manifest, parts), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is in flight. Raises: what has failed while writing."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.look()

    def wait_unless(self, given_up: Callable[[], bool]) -> bool:
        """Return when nothing is in flight, or give up once ``given_up`` says so. Returns False in that case.

        Raises: what has failed while writing.
        """
        while self._thread is not None and self._thread.is_alive():
            if given_up():
                self.abandon()
                return False
            self._thread.join(LOOK_SECONDS)
        self.wait()
        return True

    def look(self) -> None:
        """Raise what has failed while writing, if anything has."""
        if self._failure is not None:
            raise self._failure

    def finished(self) -> list[tuple[int, Path]]:
        """Return the checkpoints that were finished since the last call, each with its step; of rank 0 only."""
        found, self._finished = self._finished, []
        return found

    def linger(self, seconds: float = LINGER_SECONDS) -> None:
        """Let the checkpoint that is in flight be finished, by rank 0 too, before this rank fails; for a while."""
        if self._thread is None:
            return
        self._thread.join(seconds)
        final = checkpoints.directory_of(self.directory, self._step)
        looks = int(seconds / LOOK_SECONDS)
        while self._failure is None and not final.is_dir() and (looks := looks - 1) > 0:
            self._abandoned.wait(LOOK_SECONDS)

    def abandon(self) -> None:
        """Wait for no other rank any more: this one has failed."""
        self._abandoned.set()

    def _run(self, manifest: checkpoints.Manifest, parts: Sequence[Part]) -> None:
        try:
            temporary = checkpoints.unfinished(self.directory, manifest.step, manifest.plan_digest)
            for part in parts:
                checkpoints.write_stage(temporary, part.stage, self.num_stages, part.snapshot, part.training, part.ties)
            if self.leads and self._all_written(temporary):
                path = checkpoints.finish(self.directory, temporary, self.num_stages, manifest, self.keep)
                self._finished.append((manifest.step, path))
        except BaseException as error:
            self._failure = error

    def _all_written(self, temporary: Path) -> bool:
        """Wait for the stages of the other ranks. Raises: ArtifactError where one does not come."""
        missing = set(range(self.num_stages))
        looks = int(self.patience_seconds / LOOK_SECONDS)
        while looks := looks - 1:
            missing = {stage for stage in missing if not checkpoints.description(temporary, stage).is_file()}
            if not missing:
                return True
            if self._abandoned.wait(LOOK_SECONDS):
                return False
        raise ArtifactError(
            f"stage {min(missing)} has not written its part of the checkpoint after {self.patience_seconds:.0f} s",
            where=str(temporary),
            remedy="every rank must see the same run directory: put it on a shared disk (--run-dir)",
        )

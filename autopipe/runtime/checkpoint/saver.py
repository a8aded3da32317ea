"""``Saver``: writes the checkpoint of a rank in the background while training continues.

::

    training thread   ... | copy | next minibatches ...            | copy | ...
    writing thread               | write, fsync | (rank 0: wait for the others, rename, latest, retention)

At most one checkpoint is in flight: a second one waits for the first. One replica writes the file of a stage; the
others write checksums of what they hold. A description of each part tells rank 0 that it is written, so training
exchanges nothing. If writing fails, the rank fails at its next minibatch.
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
from autopipe.runtime.checkpoint.checksums import bits
from autopipe.runtime.checkpoint.manifest import Manifest, StageState, TensorSlice
from autopipe.runtime.checkpoint.members import sliced
from autopipe.runtime.checkpoint.parts import Part, descriptions, finish, of_member, write_part
from autopipe.runtime.checkpoint.proof import live_tensors, refuse_missing, sums_of
from autopipe.runtime.checkpoint.snapshot import Snapshot
from autopipe.runtime.step.stepper import Stepper

POLL_SECONDS = 0.01
FINISH_SECONDS = 5.0
"""How long a rank that fails waits for the checkpoint in flight."""


class Saver:
    """Writes the checkpoints of one rank.

    Args:
        directory: of the checkpoints.
        processes: for each stage, how many processes run it.
        keep: how many of the newest checkpoints are kept; 0 keeps all.
        leads: this rank finishes a checkpoint when all parts are written.
        timeout_seconds: how long it waits for them. A rank that failed is detected elsewhere long before.

    """

    def __init__(
        self, directory: Path, processes: Sequence[int], *, keep: int, leads: bool, timeout_seconds: float = 600.0
    ) -> None:
        self.directory, self.processes, self.keep, self.leads = directory, tuple(processes), keep, leads
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
        saver = Saver(directory, self.processes, keep=0, leads=self.leads, timeout_seconds=self.timeout_seconds)
        saver._initial = self._initial
        return saver

    def save(
        self,
        manifest: Manifest,
        stepper: Stepper,
        places: Mapping[int, int],
        *,
        pinned: bool = False,
        last: bool = False,
    ) -> None:
        """Copy the state of some stages into the buffers of the previous checkpoint, and start to write it.

        ``places``: which of the processes of each of these stages this one is. ``last``: nothing changes the state
        before it is written, so that what is on the CPU is not copied.

        Raises: the failure of the previous checkpoint; RunError for a state that a checkpoint cannot hold.
        """
        self.wait()
        self.write(manifest, [self._part(stepper, stage, place, pinned, last) for stage, place in places.items()])

    def _part(self, stepper: Stepper, stage: int, place: int, pinned: bool, last: bool) -> Part:
        """Sum what this process has of a stage, and copy what it writes."""
        runner, training = stepper.runners[stage], stepper.training(stage)
        code = runner.stage
        replica, member = divmod(place, code.TEAM)
        sharded = stage in stepper.shards  # each replica has an optimizer state of its own
        writers = self.processes[stage] if sharded else code.TEAM

        averages = {} if stepper.averages is None else stepper.averages.of(stage)
        weights = state.collect(runner, stepper.owned(stage))
        weights.update({f"{PREFIX}{name}": tensor for name, tensor in averages.items()})
        live = live_tensors(runner, stepper.owned(stage), averages)
        refuse_missing(weights, live, stage)
        training_state, of_optimizer = StageState(tuple(stepper.stepped(stage))), dict[str, torch.Tensor]()
        if training is not None:
            owner = f"{stage}.{replica}" if sharded else str(stage)
            training_state, of_optimizer = training.state(owner, self._initial[stage])

        counters = state.counters(runner)
        written, unwritten = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        slices, compared = dict[str, TensorSlice](), dict[str, str]()
        for tensors, replicated in ((weights, True), (of_optimizer, not sharded)):
            stored, own_slices = sliced(code, tensors)
            for name, tensor in stored.items():
                is_slice = name in own_slices
                if replicated and name not in counters:
                    compared[name] = of_member(name, member) if is_slice else name
                if (replica and replicated) or (member and not is_slice):
                    unwritten[name] = tensor
                else:
                    written[name] = tensor
            slices.update({name: part for name, part in own_slices.items() if name in written})
        sums, other_sums = (sums_of(own, live, training) for own in (written, unwritten))

        parameters = stepper.parameters(stage)
        ties = {
            of_member(name, member) if name in code.SHARDS else name: bits(parameters[name])
            for name in (tie.parameter for tie in stepper.ties.moving)
            if name in parameters
        }
        return Part(
            stage,
            self._copied(stage, written, pinned, last) if place < writers else None,
            training_state if member == 0 and (sharded or replica == 0) else StageState(),
            ties,
            slices,
            place=place,
            writers=writers,
            written=sums,
            unwritten=other_sums,
            compared=compared,
        )

    def _copied(self, stage: int, tensors: Mapping[str, torch.Tensor], pinned: bool, last: bool) -> Snapshot:
        """Copy the tensors of a stage into the buffer of its previous checkpoint."""
        snapshot = self._snapshots.setdefault(stage, Snapshot(pinned=pinned))
        snapshot.take(tensors, change=not last)
        if snapshot.refusal:
            self._refusals.setdefault(snapshot.refusal, False)
        return snapshot

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
                write_part(temporary, part, self.processes)
            if self.leads and self._all_written(temporary):
                path = finish(self.directory, temporary, self.processes, manifest, self.keep)
                self._finished.append((manifest.step, path))
        except BaseException as error:
            self._failure = error

    def _all_written(self, temporary: Path) -> bool:
        """Wait for the parts of the other ranks; False if cancelled. Raises: ArtifactError if one times out."""
        missing = descriptions(temporary, self.processes)
        polls = int(self.timeout_seconds / POLL_SECONDS)
        while polls := polls - 1:
            missing = {place: path for place, path in missing.items() if not path.is_file()}
            if not missing:
                return True
            if self._cancelled.wait(POLL_SECONDS):
                return False
        stage, place = min(missing)
        raise ArtifactError(
            f"stage {stage} has not written its part of the checkpoint after {self.timeout_seconds:.0f} s: "
            f"{missing[stage, place].name} is missing",
            where=str(temporary),
            remedy="every rank must see the same run directory: put it on a shared disk (--run-dir)",
        )

"""``AuditWriter``: a rank's part of an audit, written while training goes on.

::

    training thread   ... | copy state, store batch | minibatch N | copy weights | minibatch N + 1 ...
    writing threads                        write the state ...         | write the weights | rank 0: event

An audit never ends a run by itself: what cannot be written is left out, and rank 0 reports why. A rank that fails
leaves word in a file, so that rank 0 does not wait for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopipe.errors import AutopipeError, RunError
from autopipe.runtime.audit import batch
from autopipe.runtime.audit.files import AuditFiles
from autopipe.runtime.checkpoint import state
from autopipe.runtime.checkpoint.saver import LOOK_SECONDS, Saver
from autopipe.runtime.checkpoint.snapshot import Snapshot
from autopipe.runtime.events import Reporter
from autopipe.runtime.executor import Microbatch
from autopipe.runtime.step.stepper import Stepper

# audits that wait for their comparison: with more of them ranks wait, so that the disk does not fill
MOST_WAITING = 4
_PATIENCE_SECONDS = 600.0


@dataclass(slots=True)
class AuditWriter:
    """One rank's. ``every``: steps, 0 for none. ``stages``: those that this rank writes.

    ``checkpoints``: what writes the checkpoints of this rank. ``pinned``: as in ``Snapshot``.
    """

    run: Path
    every: int
    stages: Sequence[int]
    checkpoints: Saver
    reporter: Reporter
    pinned: bool = False
    _files: AuditFiles | None = None
    _saver: Saver | None = None
    _thread: threading.Thread | None = None
    _written: list[AuditFiles] = field(default_factory=list)
    _left_out: list[str] = field(default_factory=list)
    _given_up: list[AuditFiles] = field(default_factory=list)
    _abandoned: threading.Event = field(default_factory=threading.Event)

    def begin(self, step: int, item: Any, parts: Sequence[Microbatch], save: Callable[[Saver], None]) -> None:
        """Keep the state before minibatch ``step`` and the minibatch, where it is one that is audited.

        ``item``, ``parts``: of the minibatch, on rank 0. ``save``: gives a saver all that a checkpoint of this rank
        holds.
        """
        if not self.every or not step or step % self.every:
            return
        self.wait()
        while self._given_up:  # once more: another rank may have written after it was removed
            self._given_up.pop().clear()
        files = self._files = AuditFiles(self.run, step)
        self._await_room()
        try:
            if self.checkpoints.leads:
                batch.store(item, [part.factor for part in parts], files.batch)
        except (batch.UnstorableBatchError, OSError) as error:
            self._left_out.append(f"its minibatch cannot be stored: {error}")
        self._saver = self.checkpoints.beside(files.folder)
        save(self._saver)

    def end(self, stepper: Stepper) -> None:
        """Keep the tensors behind the step of the minibatch, where its audit was begun."""
        files, self._files = self._files, None
        if files is None:
            return
        snapshots = {}
        for stage in self.stages:
            tensors = {name: parameter.data for name, parameter in stepper.owned(stage).items()}
            tensors.update(state.buffers(stepper.runners[stage]))
            snapshots[stage] = Snapshot(pinned=self.pinned)
            snapshots[stage].take(tensors)
        self._thread = threading.Thread(target=self._write, args=(files, snapshots), name="audit", daemon=True)
        self._thread.start()

    def look(self, losses: dict[int, float]) -> None:
        """Report the audits that are written, and what was left out; of rank 0 only. ``losses``: by minibatch."""
        while self._written:
            files = self._written.pop(0)
            self.reporter.event("audit", step=files.step, loss=losses[files.step])
        while self._left_out:
            reason = self._left_out.pop(0)
            if self.checkpoints.leads:
                self.reporter.event("audit-left-out", reason=reason)

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def abandon(self) -> None:
        """Wait for no other rank any more: this one has failed."""
        self._abandoned.set()
        if self._saver is not None:
            self._saver.abandon()

    def _await_room(self) -> None:
        """Let rank 0 wait while as many audits wait for their comparison as there may be; the others wait for it."""
        folder = AuditFiles(self.run, 0).folder
        end = time.monotonic() + _PATIENCE_SECONDS
        while self.checkpoints.leads and len(list(folder.glob("*.after"))) >= MOST_WAITING and time.monotonic() < end:
            self.reporter.at("waiting for an audit", waiting=False)
            time.sleep(LOOK_SECONDS)

    def _write(self, files: AuditFiles, snapshots: dict[int, Snapshot]) -> None:
        saver, self._saver = self._saver, None
        try:
            files.after.mkdir(parents=True, exist_ok=True)
            for stage, snapshot in snapshots.items():
                path = files.after_stage(stage)
                snapshot.write(path.with_suffix(".tmp"))
                path.with_suffix(".tmp").replace(path)
            if saver is not None and not saver.wait_unless(lambda: bool(files.first_failure())):
                raise RunError(files.first_failure())
            if self.checkpoints.leads and not files.batch.is_dir():
                self._all_written(files)
                files.clear()
            elif self.checkpoints.leads and self._all_written(files):
                self._written.append(files)
        except Exception as error:  # whatever it is, the run does not depend on it
            text = error.what if isinstance(error, AutopipeError) else f"{type(error).__name__}: {error}"
            self._left_out.append(f"it cannot be written: {text}")
            self._give_up(files, text)

    def _give_up(self, files: AuditFiles, why: str) -> None:
        """Remove what was written: rank 0 all of it, another rank its own part, and it leaves word for rank 0."""
        with contextlib.suppress(OSError):
            if self.checkpoints.leads:
                self._given_up.append(files)
                files.clear()
                return
            for stage in self.stages:  # what is removed first makes room for the word on a disk that is full
                for path in (files.after_stage(stage), files.after_stage(stage).with_suffix(".tmp")):
                    path.unlink(missing_ok=True)
            if files.after.is_dir():  # else rank 0 knows already, and has removed it
                files.failure(min(self.stages, default=0)).write_text(why, encoding="utf-8")

    def _all_written(self, files: AuditFiles) -> bool:
        """Wait for the other stages. Returns False where this rank gives up.

        Raises: RunError where another rank could not write its part.
        """
        end = time.monotonic() + _PATIENCE_SECONDS
        while not files.before.is_dir() or not all(
            files.after_stage(s).is_file() for s in range(self.checkpoints.num_stages)
        ):
            if failure := files.first_failure():
                raise RunError(failure)
            if self._abandoned.wait(LOOK_SECONDS) or time.monotonic() > end:
                return False
        return True

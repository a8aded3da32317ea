"""``AuditWriter``: a rank's part of an audit, written while training continues.

::

    training thread   ... | copy state, store batch | minibatch N | copy weights | minibatch N + 1 ...
    writing threads                        write the state ...         | write the weights | rank 0: event

An audit never ends a run. If its files cannot be written, it is skipped, and rank 0 reports the reason. A rank that
fails leaves a file that says so, and rank 0 does not wait for it.
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
from autopipe.runtime.checkpoint.saver import POLL_SECONDS, Saver
from autopipe.runtime.checkpoint.snapshot import Snapshot
from autopipe.runtime.events import Reporter
from autopipe.runtime.executor import Microbatch
from autopipe.runtime.step.stepper import Stepper

# audits that wait for their comparison; the ranks wait rather than exceed it, so that the disk does not fill
MOST_WAITING = 4
_TIMEOUT_SECONDS = 600.0


@dataclass(slots=True)
class AuditWriter:
    """Writes the audits of one rank."""

    run: Path
    # minibatches from one audit to the next; 0: no audits
    every: int
    # the stages whose state after the step this rank writes
    stages: Sequence[int]
    # writes the checkpoints of this rank
    checkpoints: Saver
    reporter: Reporter
    # as in ``Snapshot``
    pinned: bool = False
    _files: AuditFiles | None = None
    _saver: Saver | None = None
    _thread: threading.Thread | None = None
    _written: list[AuditFiles] = field(default_factory=list)
    _skipped: list[str] = field(default_factory=list)
    _given_up: list[AuditFiles] = field(default_factory=list)
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def begin(self, step: int, item: Any, parts: Sequence[Microbatch], save: Callable[[Saver], None]) -> None:
        """Keep the state before minibatch ``step``, and the minibatch, if it is to be audited.

        ``item`` and ``parts`` are the minibatch on rank 0. ``save`` passes the state of this rank to a saver.
        """
        if not self.every or not step or step % self.every:
            return
        self.wait()
        while self._given_up:  # again: another rank may have written after the files were removed
            self._given_up.pop().clear()
        files = self._files = AuditFiles(self.run, step)
        self._wait_for_comparisons()
        try:
            if self.checkpoints.leads:
                batch.store(item, [part.factor for part in parts], files.batch)
        except (batch.UnstorableBatchError, OSError) as error:
            self._skipped.append(f"its minibatch cannot be stored: {error}")
        self._saver = self.checkpoints.for_directory(files.folder)
        save(self._saver)

    def end(self, stepper: Stepper) -> None:
        """Keep the tensors after the step of the minibatch, if its audit has begun."""
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

    def report(self, losses: dict[int, float]) -> None:
        """Report the audits that were written and those that were skipped. ``losses`` is by minibatch, on rank 0."""
        while self._written:
            files = self._written.pop(0)
            self.reporter.event("audit", step=files.step, loss=losses[files.step])
        while self._skipped:
            reason = self._skipped.pop(0)
            if self.checkpoints.leads:
                self.reporter.event("audit-left-out", reason=reason)

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def cancel(self) -> None:
        """Stop waiting for other ranks: this one has failed."""
        self._cancelled.set()
        if self._saver is not None:
            self._saver.cancel()

    def _wait_for_comparisons(self) -> None:
        """Wait, on rank 0, while too many audits wait for their comparison. The other ranks wait for rank 0."""
        folder = AuditFiles(self.run, 0).folder
        end = time.monotonic() + _TIMEOUT_SECONDS
        while self.checkpoints.leads and len(list(folder.glob("*.after"))) >= MOST_WAITING and time.monotonic() < end:
            self.reporter.at("waiting for an audit", waiting=False)
            time.sleep(POLL_SECONDS)

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
        except Exception as error:  # any: the run does not depend on an audit
            text = error.what if isinstance(error, AutopipeError) else f"{type(error).__name__}: {error}"
            self._skipped.append(f"it cannot be written: {text}")
            self._give_up(files, text)

    def _give_up(self, files: AuditFiles, reason: str) -> None:
        """Remove the files. Rank 0 removes all; another rank removes its own and leaves the reason for rank 0."""
        with contextlib.suppress(OSError):
            if self.checkpoints.leads:
                self._given_up.append(files)
                files.clear()
                return
            for stage in self.stages:  # on a full disk, this makes room for the reason
                for path in (files.after_stage(stage), files.after_stage(stage).with_suffix(".tmp")):
                    path.unlink(missing_ok=True)
            if files.after.is_dir():  # otherwise rank 0 has removed it already
                files.failure(min(self.stages, default=0)).write_text(reason, encoding="utf-8")

    def _all_written(self, files: AuditFiles) -> bool:
        """Wait for the other stages. Return False if cancelled or timed out.

        Raises: RunError if another rank could not write its part.
        """
        end = time.monotonic() + _TIMEOUT_SECONDS
        while not files.before.is_dir() or not all(
            files.after_stage(s).is_file() for s in range(len(self.checkpoints.writers))
        ):
            if failure := files.first_failure():
                raise RunError(failure)
            if self._cancelled.wait(POLL_SECONDS) or time.monotonic() > end:
                return False
        return True

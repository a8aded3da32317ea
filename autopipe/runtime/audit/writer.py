"""``AuditWriter``: a rank's part of an audit, written while training continues.

::

    training thread   ... | copy state, store batch | minibatch N | copy state | minibatch N + 1 ...
    writing threads                        write the state ...         | write it  | rank 0: event

If the files cannot be written, the audit is skipped, and rank 0 reports the reason. A rank that cannot write leaves a
file that says so, and rank 0 does not wait for it. Replicas or tied copies that are no longer equal are no reason to
skip: the audit has failed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopipe.errors import ArtifactError, AutopipeError, RunError
from autopipe.ir.artifact import write_text
from autopipe.runtime.audit import batch
from autopipe.runtime.audit.files import AuditFiles
from autopipe.runtime.checkpoint.saver import POLL_SECONDS, Saver
from autopipe.runtime.events import Reporter
from autopipe.runtime.step.loss_weights import Divisors

# audits that wait for their comparison; the ranks wait rather than exceed it, so that the disk does not fill
MOST_WAITING = 4
_TIMEOUT_SECONDS = 600.0


@dataclass(slots=True)
class AuditWriter:
    """Writes the audits of one rank."""

    run: Path
    # whether a minibatch is audited by the settings of the run
    wanted: Callable[[int], bool]
    # writes the checkpoints of this rank
    checkpoints: Saver
    reporter: Reporter
    _files: AuditFiles | None = None
    _savers: list[Saver] = field(default_factory=list)
    _thread: threading.Thread | None = None
    _written: list[AuditFiles] = field(default_factory=list)
    _skipped: list[str] = field(default_factory=list)
    _failed: list[tuple[int, str]] = field(default_factory=list)
    _given_up: list[AuditFiles] = field(default_factory=list)
    _postponed: bool = False

    def due(self, step: int) -> bool:
        """Return whether a minibatch is audited: the settings say so, or the step of the last one was skipped."""
        return self._postponed or self.wanted(step)

    def begin(
        self, step: int, item: Any, divisors: Callable[[Any], Divisors | None], save: Callable[[Saver], None]
    ) -> None:
        """Keep the state before minibatch ``step``, and the minibatch, if it is to be audited.

        ``item``: the minibatch on rank 0. ``divisors`` returns those of its loss: the factors of its parts are not
        stored, so the comparison computes its own. ``save`` passes the state of this rank to a saver.
        """
        if not self.due(step):
            return
        self.wait()
        while self._given_up:  # again: another rank may have written after the files were removed
            self._given_up.pop().clear()
        files = self._files = AuditFiles(self.run, step)
        self._wait_for_comparisons()
        try:
            if self.checkpoints.leads:
                batch.store(item, divisors(item), files.batch)
        except (batch.UnstorableBatchError, OSError) as error:
            self._skipped.append(f"its minibatch cannot be stored: {error}")
        self._savers = [self.checkpoints.for_directory(files.folder)]
        save(self._savers[0])

    def end(self, save: Callable[[Saver], None], *, skipped: bool) -> None:
        """Keep the state after the step of the minibatch, if its audit has begun. ``save``: as in ``begin``.

        ``skipped``: the step was not taken, because a gradient was not finite; the next minibatch is audited as well.
        """
        files, self._files = self._files, None
        if files is None:
            return
        self._postponed = skipped
        self._savers.append(self.checkpoints.for_directory(files.after))
        save(self._savers[1])
        self._thread = threading.Thread(target=self._finish, args=(files,), name="audit", daemon=True)
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
        while self._failed:
            step, reason = self._failed.pop(0)
            self.reporter.event("audit-failed", step=step, reason=reason)

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def cancel(self) -> None:
        """Stop waiting for other ranks: this one has failed."""
        for saver in self._savers:
            saver.cancel()

    def _wait_for_comparisons(self) -> None:
        """Wait, on rank 0, while too many audits wait for their comparison. The other ranks wait for rank 0."""
        folder = AuditFiles(self.run, 0).folder
        end = time.monotonic() + _TIMEOUT_SECONDS
        while self.checkpoints.leads and len(list(folder.glob("*.after"))) >= MOST_WAITING and time.monotonic() < end:
            self.reporter.at("waiting for an audit", waiting=False)
            time.sleep(POLL_SECONDS)

    def _finish(self, files: AuditFiles) -> None:
        """Wait until this rank has written its part, and on rank 0 until all have."""
        leads = self.checkpoints.leads
        try:
            for saver in self._savers:
                if not saver.wait_unless(lambda: bool(files.first_failure())):
                    raise ArtifactError(files.first_failure())
            if leads and not files.batch.is_dir():
                files.clear()
            elif leads and files.before.is_dir() and files.checkpoint_after.is_dir():  # else cancelled
                self._written.append(files)
        except RunError as error:  # of the checkpoint: replicas or copies of a tied parameter differ
            self._failed.append((files.step, error.what))
            self._give_up(files, error.what)
        except Exception as error:  # any: the run does not depend on an audit
            text = error.what if isinstance(error, AutopipeError) else f"{type(error).__name__}: {error}"
            self._skipped.append(f"it cannot be written: {text}")
            self._give_up(files, text)
        finally:
            self._savers = []  # they hold copies of the state

    def _give_up(self, files: AuditFiles, reason: str) -> None:
        """End writing. Rank 0 then removes the files; another rank leaves the reason for rank 0."""
        for saver in self._savers:
            saver.cancel()
            with contextlib.suppress(Exception):
                saver.wait()
        with contextlib.suppress(OSError, ArtifactError):
            if self.checkpoints.leads:
                self._given_up.append(files)
                files.clear()
            elif files.folder.is_dir():
                write_text(files.failure(os.getpid()), reason)

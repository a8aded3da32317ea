"""The files of the audit of minibatch N in the run directory.

::

    RUN/audits/
      step-N/             the state before the minibatch, as a checkpoint
      step-N.after/       the state after its step, as a checkpoint in ``step-M``, M = N + 1
      step-N.batch/       the minibatch: batch.json, batch.safetensors
      step-N.json         the result

If nothing differs, all but the result is removed.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from autopipe.ir import artifact
from autopipe.runtime.checkpoint import directory as checkpoints

EQUAL, DIFFERENT, LEFT_OUT = "equal", "different", "left out"


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The comparison of minibatch ``step`` of a run with the plain loop."""

    step: int
    # EQUAL, DIFFERENT or LEFT_OUT
    status: str
    # whether all tensors are equal bit for bit
    bitwise: bool = False
    # the tensor with the largest difference, and the stage that steps it
    name: str = ""
    stage: int = -1
    # its largest difference, relative to its largest value
    error: float = 0.0
    # how many of ``tensors`` differ beyond the tolerance
    differing: int = 0
    tensors: int = 0
    # why the audit was skipped, why the step differs if no tensor does, or why equality is promised only up to rounding
    reason: str = ""
    # whether the minibatch is the next one of the data, read again; None: not compared
    in_place: bool | None = None
    # CPU time of the process
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AuditFiles:
    """The paths of one audit in the run directory ``run``."""

    run: Path
    step: int

    @property
    def folder(self) -> Path:
        """The directory of all audits of the run."""
        return self.run / "audits"

    @property
    def before(self) -> Path:
        """The checkpoint of the state before the minibatch."""
        return checkpoints.directory_of(self.folder, self.step)

    @property
    def after(self) -> Path:
        """The folder of the state after the step."""
        return self.before.with_suffix(".after")

    @property
    def checkpoint_after(self) -> Path:
        """The checkpoint of the state after the step."""
        return checkpoints.directory_of(self.after, self.step + 1)

    @property
    def batch(self) -> Path:
        """The folder of the minibatch."""
        return self.before.with_suffix(".batch")

    @property
    def result(self) -> Path:
        """The file of the result."""
        return self.before.with_suffix(".json")

    def failure(self, process: int) -> Path:
        """Return the file in which the process of a rank reports that it could not write its part."""
        return self.after / f"rank-{process}.failed"

    def first_failure(self) -> str:
        """Return the first failure that a rank has reported, "" if no rank has."""
        with contextlib.suppress(OSError):
            for path in sorted(self.after.glob("rank-*.failed")):
                return path.read_text(encoding="utf-8", errors="replace") or "a rank could not write its part"
        return ""

    def save(self, result: AuditResult) -> None:
        """Write the result."""
        artifact.save(result, self.result)

    def load(self) -> AuditResult:
        """Read the result. Raises: ArtifactError if it is missing."""
        return artifact.load(AuditResult, self.result, renew="the audit of another step")

    def clear(self) -> None:
        """Remove everything but the result."""
        for path in (self.before, self.after, self.batch):
            shutil.rmtree(path, ignore_errors=True)


def clear_all(run: Path, keep: int = -1) -> None:
    """Remove the files of all audits but their results and the files of step ``keep``. No rank may be writing."""
    folder, kept = run / "audits", AuditFiles(run, keep)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and path not in (kept.before, kept.after, kept.batch):
            shutil.rmtree(path, ignore_errors=True)

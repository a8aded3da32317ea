"""What an audit of minibatch N puts into the run directory, and the result that stays there.

::

    RUN/audits/
      step-N/             the state before the minibatch, as a checkpoint
      step-N.after/       model tensors behind its step, one safetensors file a stage
      step-N.batch/       the minibatch: batch.json, batch.safetensors
      step-N.json         the result

All but the result is removed when nothing differs.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from autopipe.ir import artifact
from autopipe.runtime.checkpoint import checkpoint as checkpoints

EQUAL, DIFFERENT, LEFT_OUT = "equal", "different", "left out"


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Minibatch ``step`` of a run against the plain loop. ``status``: EQUAL, DIFFERENT or LEFT_OUT.

    ``bitwise``: not one bit differs. ``name``, ``stage``, ``error``: the tensor that differs most, the stage that steps
    it, and the largest difference relative to its largest value. ``differing`` of ``tensors`` are beyond the tolerance.
    ``reason``: why it was left out, or why only closeness is promised. ``seconds``: of CPU time, of the whole process.
    """

    step: int
    status: str
    bitwise: bool = False
    name: str = ""
    stage: int = -1
    error: float = 0.0
    differing: int = 0
    tensors: int = 0
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AuditFiles:
    """The paths of one audit. ``run``: the run directory."""

    run: Path
    step: int

    @property
    def folder(self) -> Path:
        """Where all audits of the run are."""
        return self.run / "audits"

    @property
    def before(self) -> Path:
        """The checkpoint of the state before the minibatch."""
        return checkpoints.directory_of(self.folder, self.step)

    @property
    def after(self) -> Path:
        """The folder of the tensors behind the step."""
        return self.before.with_suffix(".after")

    @property
    def batch(self) -> Path:
        """The folder of the minibatch."""
        return self.before.with_suffix(".batch")

    @property
    def result(self) -> Path:
        """The file of the result."""
        return self.before.with_suffix(".json")

    def after_stage(self, stage: int) -> Path:
        """Return the file of one stage's tensors behind the step."""
        return self.after / f"stage-{stage}.safetensors"

    def failure(self, stage: int) -> Path:
        """Return the file in which the rank that writes a stage says that it could not."""
        return self.after / f"stage-{stage}.failed"

    def first_failure(self) -> str:
        """Return what a rank has said of its failure, "" where none has."""
        with contextlib.suppress(OSError):
            for path in sorted(self.after.glob("stage-*.failed")):
                return path.read_text(encoding="utf-8", errors="replace") or "a rank could not write its part"
        return ""

    def save(self, result: AuditResult) -> None:
        """Write the result."""
        artifact.save(result, self.result)

    def load(self) -> AuditResult:
        """Read the result. Raises: ArtifactError where it is missing."""
        return artifact.load(AuditResult, self.result, renew="the audit of another step")

    def clear(self) -> None:
        """Remove everything but the result."""
        for path in (self.before, self.after, self.batch):
            shutil.rmtree(path, ignore_errors=True)


def clear_all(run: Path, keep: int = -1) -> None:
    """Remove what audits have left, but for results and the files of step ``keep``. No rank may be writing."""
    folder, kept = run / "audits", AuditFiles(run, keep)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and path not in (kept.before, kept.after, kept.batch):
            shutil.rmtree(path, ignore_errors=True)

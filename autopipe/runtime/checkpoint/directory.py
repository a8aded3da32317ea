"""The directories of checkpoints: one a step. No torch, so that commands which only look at runs answer at once.

A checkpoint is written to ``step-N.PLAN.tmp``, flushed to the disk, renamed, and only then named in ``latest``: a crash
leaves the old checkpoint or the new one, never a mixture. An older checkpoint of the same step is ``step-N.replaced``
until the new one has its place. Nothing in it can run code.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from autopipe.ir.artifact import write_text

_STEP = re.compile(r"step-(\d{8,})")
_REPLACED = ".replaced"
_INCOMPLETE = re.compile(r"step-\d{8,}(\.\w+)?\.(tmp|old)|\.latest\.\d+\.tmp")


def directory_of(checkpoints: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint."""
    return checkpoints / f"step-{step:08d}"


def steps(checkpoints: Path) -> list[int]:
    """Return the steps of the finished checkpoints, ascending. ``Checkpoint.verify`` checks that one is intact."""
    if not checkpoints.is_dir():
        return []
    matches = [_STEP.fullmatch(path.name) for path in checkpoints.iterdir()]
    return sorted(int(match[1]) for match in matches if match)


# -- writing -----------------------------------------------------------------------------------------------------------


def unfinished(checkpoints: Path, step: int, plan_digest: str) -> Path:
    """Return the directory in which a step's checkpoint is written.

    Each plan has its own. A host that lost its connection may still write its part of an attempt that the other hosts
    have given up and continued under another plan. Under the same plan it would write the same bytes.
    """
    return checkpoints / f"step-{step:08d}.{plan_digest}.tmp"


def publish(temporary: Path, final: Path, keep: int) -> None:
    """Give a complete checkpoint its name, make it the latest one, and keep the newest ``keep``; 0 keeps all.

    Raises: OSError.
    """
    checkpoints = final.parent
    _sync_directory(temporary)
    replaced = _rename(final, _REPLACED) if final.exists() else None
    temporary.rename(final)
    _sync_directory(checkpoints)
    if replaced is not None:
        shutil.rmtree(replaced)
    write_text(checkpoints / "latest", final.name + "\n")
    for old in steps(checkpoints)[:-keep] if keep else []:
        _remove(directory_of(checkpoints, old))


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- removing ----------------------------------------------------------------------------------------------------------


def _remove(directory: Path) -> None:
    """Remove a checkpoint. It is renamed first: a checkpoint that is half removed must not look like one."""
    shutil.rmtree(_rename(directory, ".old"))


def _rename(directory: Path, suffix: str) -> Path:
    """Add a suffix to the name of a checkpoint, and return its new path."""
    path = directory.with_name(directory.name + suffix)
    shutil.rmtree(path, ignore_errors=True)
    directory.rename(path)
    return path


def clear_unfinished(checkpoints: Path) -> None:
    """Remove what a crash left half written or half removed. No process may be writing there.

    A checkpoint that was to be replaced, by one that has not taken its place, is put back.
    """
    for replaced in checkpoints.glob(f"step-*{_REPLACED}"):
        place = replaced.with_suffix("")
        if place.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(place)
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        if not _INCOMPLETE.fullmatch(path.name):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def set_aside(checkpoints: Path, step: int) -> list[int]:
    """Rename the checkpoints of steps after ``step`` to ``step-N.abandoned``, and return their steps.

    They belong to a run that is given up by resuming from an earlier checkpoint. The resumed run must never use them.
    """
    clear_unfinished(checkpoints)
    later_steps = [each for each in steps(checkpoints) if each > step]
    for later in later_steps:
        aside = directory_of(checkpoints, later).with_suffix(".abandoned")
        shutil.rmtree(aside, ignore_errors=True)
        directory_of(checkpoints, later).rename(aside)
    return later_steps

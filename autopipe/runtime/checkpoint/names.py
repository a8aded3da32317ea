"""The names of finished checkpoints. No torch, so that commands which only look at runs answer at once."""

from __future__ import annotations

import re
from pathlib import Path

_STEP = re.compile(r"step-(\d{8,})")


def directory_of(checkpoints: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint."""
    return checkpoints / f"step-{step:08d}"


def steps(checkpoints: Path) -> list[int]:
    """Return the steps of the finished checkpoints, ascending. ``Checkpoint.verify`` checks that one is intact."""
    if not checkpoints.is_dir():
        return []
    matches = [_STEP.fullmatch(path.name) for path in checkpoints.iterdir()]
    return sorted(int(match[1]) for match in matches if match)

"""A folder that a test has copied: its model file is named there, as a user would after moving a project."""

from __future__ import annotations

from pathlib import Path

from autopipe.commands.named import remember, remember_stages
from autopipe.ir import artifact
from autopipe.ir.profile import Profile


def name_again(work_dir: Path = Path(".autopipe")) -> None:
    """Name what the profile of a work directory names, seen from the current folder, and its stage files."""
    remember(artifact.load(Profile, work_dir / "profile.json", renew="").workload)
    remember_stages(work_dir / "stages")

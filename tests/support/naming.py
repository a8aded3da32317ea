"""Name the model file of a copied folder again, as a user would after moving a project."""

from __future__ import annotations

from pathlib import Path

from autopipe.commands.named import remember, remember_stages
from autopipe.ir import artifact
from autopipe.ir.profile import Profile


def name_again(work_dir: Path = Path(".autopipe")) -> None:
    """Record the model file of the profile and the stage files as named by the user."""
    remember(artifact.load(Profile, work_dir / "profile.json", renew="").workload)
    remember_stages(work_dir / "stages")

"""The work directory: which artifact lies where, and reading one that may be missing or of another version."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from autopipe.errors import ArtifactError
from autopipe.ir import artifact
from autopipe.ir.cluster import Cluster
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.workflow.requests import PlanRequest
from autopipe.workflow.settings import Progress

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """What a stored plan was made from. ``profile_digest``: of the profile's figures."""

    plan_digest: str
    profile_digest: str
    request: PlanRequest
    cluster: Cluster


@dataclass(frozen=True, slots=True)
class Store:
    """The paths of a work directory."""

    path: Path

    @property
    def profile(self) -> Path:
        """What the model costs."""
        return self.path / "profile.json"

    @property
    def plan(self) -> Path:
        """Which rank runs what."""
        return self.path / "plan.json"

    @property
    def record(self) -> Path:
        """What the plan was made from."""
        return self.path / "plan-record.json"

    @property
    def stages(self) -> Path:
        """The generated files."""
        return self.path / "stages"

    @property
    def timeline(self) -> Path:
        """The last simulated timeline."""
        return self.path / "timeline.json"

    @property
    def links(self) -> Path:
        """What was measured between two ranks of this machine."""
        return self.path / "links.json"

    def stored_profile(self) -> Profile:
        """Read the profile. Raises: ArtifactError that says how to make one."""
        return artifact.load(Profile, self.profile, renew="autopipe profile TARGET")

    def stored_plan(self) -> tuple[Plan, PlanRecord]:
        """Read the plan. Raises: ArtifactError that says how to make one."""
        renew = "autopipe plan TARGET --gpus N"
        plan = artifact.load(Plan, self.plan, renew=renew)
        record = artifact.load(PlanRecord, self.record, renew=renew)
        if record.plan_digest != plan.digest:
            raise ArtifactError(
                "plan.json and plan-record.json do not belong together", where=str(self.plan), remedy=renew
            )
        return plan, record


def profile_digest(profile: Profile) -> str:
    """Name the figures of a profile."""
    figures = profile.device, profile.measurements
    return artifact.digest((profile.graph.digest, figures, profile.optimizer_seconds_per_byte))


def _silent(what: str, fraction: float) -> None:
    """Take progress that nobody watches."""


@dataclass(slots=True)
class Work:
    """One command at work: where it reads and writes, who watches, and what it has to say at the end."""

    store: Store
    progress: Progress
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def begin(work_dir: Path, progress: Progress | None) -> Work:
        """Begin a command."""
        return Work(Store(work_dir), progress or _silent)

    def found(self, kind: type[T], path: Path) -> T | None:
        """Return an artifact, None where it is missing; one that cannot be used is noted and made anew."""
        if not path.exists():
            return None
        try:
            return artifact.load(kind, path, renew="")
        except ArtifactError as error:
            self.notes.append(f"{path.name} cannot be used and is made anew: {error.what}")
            return None

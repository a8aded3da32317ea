"""The work directory: which artifact lies where, and reading one that may be missing or of another version."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from autopipe.commands.settings import WORK_DIRECTORY, Progress
from autopipe.errors import ArtifactError, VersionError
from autopipe.ir import artifact
from autopipe.ir.cluster import Cluster
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.planning.requests import PlanRequest

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

    def renew(self, path: Path) -> str:
        """Return the command that writes an artifact anew."""
        command = {
            self.profile: "autopipe profile TARGET",
            self.links: "autopipe doctor --links",
        }.get(path, "autopipe plan TARGET --gpus N")
        return command if self.path == WORK_DIRECTORY else f"{command} --work-dir {shlex.quote(str(self.path))}"

    def stored_profile(self) -> Profile:
        """Read the profile. Raises: ArtifactError that says how to make one."""
        return artifact.load(Profile, self.profile, renew=self.renew(self.profile))

    def stored_plan(self) -> tuple[Plan, PlanRecord]:
        """Read the plan. Raises: ArtifactError that says how to make one."""
        renew = self.renew(self.plan)
        plan = artifact.load(Plan, self.plan, renew=renew)
        record = artifact.load(PlanRecord, self.record, renew=renew)
        self.refuse_strangers(plan, record)
        return plan, record

    def refuse_strangers(self, plan: Plan, record: PlanRecord) -> None:
        """Refuse a plan that is not the one of its record: one of the two was changed or comes from elsewhere.

        Raises: ArtifactError.
        """
        if record.plan_digest != plan.digest:
            raise ArtifactError(
                "plan.json and plan-record.json do not belong together",
                where=str(self.plan),
                remedy=self.renew(self.plan),
            )


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
        """Return an artifact, None where it is missing; one of another format version is noted and made anew.

        Raises: ArtifactError for a damaged one: somebody changed it, or the disk did, and neither is passed over.
        """
        if not path.exists():
            return None
        try:
            return artifact.load(kind, path, renew=self.store.renew(path))
        except VersionError as error:
            self.notes.append(f"made anew: {error.what}")
            return None

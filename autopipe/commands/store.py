"""The work directory: the paths of its artifacts, how they are loaded, and when they are stale.

An artifact is stale if an input that it was made from has another value now. The inputs are compared in order, and the
first that differs is the reason, which a command says: ``measuring.profile_inputs``, ``choose.plan_inputs``,
``artifact_steps.stages_inputs``.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from autopipe.commands.settings import WORK_DIRECTORY, Progress
from autopipe.errors import ArtifactError, VersionError
from autopipe.ir import artifact
from autopipe.ir.cluster import Cluster
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile, WorkloadSpec
from autopipe.planning.requests import PlanRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The origin of a stored plan."""

    plan_digest: str
    profile_digest: str  # of the profile's figures
    request: PlanRequest
    cluster: Cluster


@dataclass(frozen=True, slots=True)
class StagesRecord:
    """The origin of the stage files of a work directory."""

    graph_digest: str
    plan_digest: str
    divisor: str  # of the loss, as text
    versions: tuple[str, ...]  # of what wrote them; see ``capture_inputs.versions``


@dataclass(frozen=True, slots=True)
class Store:
    """The paths of a work directory."""

    path: Path

    @property
    def profile(self) -> Path:
        """The profile of the model."""
        return self.path / "profile.json"

    @property
    def inputs(self) -> Path:
        """What the graph of the profile was captured from."""
        return self.path / "capture-inputs.json"

    def profile_of_team(self, size: int) -> Path:
        """Return the path of the profile of a member of a team, which ``--tensor-parallel auto`` compares."""
        return self.path / f"profile-team-{size}.json"

    @property
    def plan(self) -> Path:
        """The plan."""
        return self.path / "plan.json"

    @property
    def record(self) -> Path:
        """The origin of the plan."""
        return self.path / "plan-record.json"

    @property
    def stages(self) -> Path:
        """The generated files."""
        return self.path / "stages"

    @property
    def stages_record(self) -> Path:
        """The origin of the generated files."""
        return self.path / "stages-record.json"

    @property
    def timeline(self) -> Path:
        """The last simulated timeline."""
        return self.path / "timeline.json"

    @property
    def links(self) -> Path:
        """The measured links between two ranks of this machine."""
        return self.path / "links.json"

    @property
    def question(self) -> Store:
        """The work directory of plans for devices that this machine does not have."""
        return Store(self.path / "question")

    @property
    def newest(self) -> Store:
        """Where the newest plan is: here, or in ``question``."""
        return self.question if written(self.question.record) > written(self.record) else self

    def runs(self) -> list[Path]:
        """Return the directories of the runs, the newest last: their names are times."""
        folder = self.path / "runs"
        return sorted(path for path in folder.iterdir() if (path / "job.json").is_file()) if folder.is_dir() else []

    def renew(self, path: Path) -> str:
        """Return the command that writes an artifact again."""
        command = {
            **dict.fromkeys((self.profile, self.inputs), "autopipe profile TARGET"),
            self.links: "autopipe doctor --links",
        }.get(path, "autopipe plan TARGET --gpus N")
        return command if self.path == WORK_DIRECTORY else f"{command} --work-dir {shlex.quote(str(self.path))}"

    def stored_profile(self) -> Profile:
        """Load the profile. Raises: ArtifactError, with the command that makes one."""
        return artifact.load(Profile, self.profile, renew=self.renew(self.profile))

    def stored_plan(self) -> tuple[Plan, PlanRecord]:
        """Load the plan. Raises: ArtifactError, with the command that makes one."""
        renew = self.renew(self.plan)
        plan = artifact.load(Plan, self.plan, renew=renew)
        record = artifact.load(PlanRecord, self.record, renew=renew)
        self.refuse_mismatch(plan, record)
        return plan, record

    def refuse_mismatch(self, plan: Plan, record: PlanRecord) -> None:
        """Refuse a plan whose record belongs to another plan, because one of the two was changed or copied.

        Raises: ArtifactError.
        """
        if record.plan_digest != plan.digest:
            raise ArtifactError(
                "plan.json and plan-record.json do not belong together",
                where=str(self.plan),
                remedy=self.renew(self.plan),
            )


@dataclass(frozen=True, slots=True)
class Input:
    """An input of an artifact: its value when the artifact was written, and its value now."""

    written: Any
    now: Any
    reason: str  # why the artifact is stale if they differ, with {written} and {now}


def stale(inputs: Iterable[Input]) -> str:
    """Return the reason of the first input that differs, or "" without one. The inputs after it are not computed."""
    different = (entry for entry in inputs if entry.written != entry.now)
    return next((entry.reason.format(written=entry.written, now=entry.now) for entry in different), "")


def team_inputs(stored: WorkloadSpec, now: WorkloadSpec) -> Iterator[Input]:
    """Yield the team of a workload, compared with that of a command."""
    yield Input(stored.team, now.team, "the team changed (--tensor-parallel {written} -> {now})")
    given = f"--{'' if now.sequence else 'no-'}sequence-parallel was given"
    yield Input(stored.sequence, now.sequence, given)


def written(path: Path) -> int:
    """Return when a file was written, as a number that grows; 0 without one."""
    return path.stat().st_mtime_ns if path.is_file() else 0


def profile_digest(profile: Profile) -> str:
    """Return the digest of a profile's figures."""
    figures = profile.device, profile.measurements
    return artifact.digest((profile.graph.digest, figures, profile.optimizer_seconds_per_byte))


@dataclass(slots=True)
class Work:
    """The context of one command: its work directory, its progress, and its notes."""

    store: Store
    progress: Progress
    notes: list[str] = field(default_factory=list)
    elsewhere: bool = False  # the ranks run on hosts whose cores are not known

    @staticmethod
    def begin(work_dir: Path, progress: Progress | None, *, elsewhere: bool = False) -> Work:
        """Return the context of a new command."""
        return Work(Store(work_dir), progress or (lambda what, fraction: None), elsewhere=elsewhere)

    def load(self, kind: type[T], path: Path) -> T | None:
        """Return an artifact, or None if it is missing or has another format version. The latter adds a note.

        Raises: ArtifactError for a damaged artifact, which is never replaced silently.
        """
        if not path.exists():
            return None
        try:
            return artifact.load(kind, path, renew=self.store.renew(path))
        except VersionError as error:
            self.notes.append(f"rebuilt: {error.what}")
            return None

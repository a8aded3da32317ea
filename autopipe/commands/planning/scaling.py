"""Step time and cost by number of devices: one search for each number, on a stored profile."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from autopipe.commands.locks import only_one
from autopipe.commands.measuring import ensure_profile
from autopipe.commands.planning.choose import batch_of, cluster_of, search, with_averages
from autopipe.commands.planning.request import request_of
from autopipe.commands.settings import AUTO_TEAM, PlanSettings, Progress
from autopipe.commands.store import Work
from autopipe.errors import AutopipeError, PlanError, RunError, counted
from autopipe.ir.cluster import Cluster
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.planning import PlanOptions
from autopipe.planning.clusters import by_datasheet
from autopipe.planning.requests import PlanRequest
from autopipe.planning.search_space import Space, most_stages
from autopipe.planning.teams import of_teams
from autopipe.report.results import Scaling, ScalingPoint

SAMPLES = 1_000_000
"""The number of samples whose cost is reported."""


@dataclass(frozen=True, slots=True)
class _Base:
    """The inputs that all searches share."""

    profile: Profile
    request: PlanRequest
    batch_size: int
    work: Work


def sweep_gpus(settings: PlanSettings, counts: tuple[int, ...], progress: Progress | None = None) -> Scaling:
    """Return the best plan for each number of devices, or the reason why it cannot be made. Writes nothing.

    Replicas are allowed unless ``--replicas never`` is given. Ctrl-C ends the sweep with the numbers so far.

    Raises: RunError if there is no plan for any number.
    """
    base = _base(settings, progress)
    points: list[ScalingPoint] = []
    start = time.perf_counter()
    try:
        for index, count in enumerate(counts):
            base.work.progress(f"planning for {count} devices", index / len(counts))
            points.append(_point(base, count))
            given = base.request.cluster
            if given is not None and count > given.num_ranks:
                base.work.notes.append(
                    f"{count} devices exceed the {given.num_ranks} of the cluster file: its outermost level "
                    f"({given.levels[-1].name}) is assumed to be wider"
                )
    except KeyboardInterrupt:
        if not points:
            raise
        base.work.notes.append(f"interrupted: {len(points)} of {len(counts)} numbers of devices")
    if all(point.plan is None for point in points):
        raise RunError(f"no plan for any of {', '.join(map(str, counts))} devices: {points[-1].reason}")
    return Scaling(base.profile.graph.name, base.batch_size, tuple(points), time.perf_counter() - start, _notes(base))


def _base(settings: PlanSettings, progress: Progress | None) -> _Base:
    if settings.profile.model.team == AUTO_TEAM:
        raise PlanError(
            "--sweep-gpus does not compare teams of several sizes: --tensor-parallel is auto",
            remedy="give a number, such as --tensor-parallel 2, and sweep each",
        )
    work = Work.begin(settings.work_dir, progress)
    request = request_of(settings)
    stored = None if settings.profile.needs_model_file else work.load(Profile, work.store.profile)
    if stored is not None and (batch_size := request.batch_size or stored.batch_size):
        return _Base(stored, request, batch_size, work)
    with only_one(settings.work_dir, "measures a model"):
        model, profile = ensure_profile(settings.profile, work)
    return _Base(profile, request, batch_of(model.workload, request, work), work)


def _point(base: _Base, count: int) -> ScalingPoint:
    team = base.profile.workload.team
    if count % team:
        return ScalingPoint(count, None, 0.0, f"{counted(count, 'device')} cannot be divided into teams of {team}")
    try:
        cluster = _cluster(base, count)
        space = Space.of(base.request, count // team, base.batch_size)
        plan, search_progress = search(
            with_averages(base.profile, base.request),
            cluster,
            _choices(base, space, count // team),
            lambda what, fraction: None,
        )
    except AutopipeError as error:
        return ScalingPoint(count, None, 0.0, error.what)
    if search_progress.stopped:
        raise KeyboardInterrupt  # the result of an incomplete search is not comparable with the others
    return ScalingPoint(count, plan, _device_hours(plan, count))


def _choices(base: _Base, space: Space, count: int) -> tuple[PlanOptions, ...]:
    if base.request.replicas == "never" or not space.replicated:
        return space.unreplicated
    return space.choices("auto") if count <= most_stages(base.profile) else space.replicated


def _device_hours(plan: Plan, count: int) -> float:
    """Return the device-hours of ``SAMPLES`` samples, including devices that the plan leaves unused."""
    return count / plan.predicted.samples_per_second * SAMPLES / 3600


def _cluster(base: _Base, count: int) -> Cluster:
    """Return the cluster with ``count`` devices. The outermost level of a cluster file is resized to fit them."""
    given = base.request.cluster
    if given is None:
        return cluster_of(base.request, count // base.profile.workload.team, base.profile, base.work)
    inner = given.num_ranks // given.levels[-1].count
    levels = (*given.levels[:-1], dataclasses.replace(given.levels[-1], count=-(-count // inner)))
    if len(set(given.devices)) > 1:
        raise RunError(
            f"the devices of the cluster file differ, so it is unknown which of them are the {count} to plan for",
            remedy="give one [device] for all ranks",
        )
    devices = by_datasheet(Cluster(levels, given.devices[:1], given.source), base.profile)
    return of_teams(devices, base.profile.workload.team)


def _notes(base: _Base) -> tuple[str, ...]:
    notes = list(base.work.notes)
    given = base.request.cluster
    cluster = cluster_of(base.request, given.num_ranks if given is not None else 1, base.profile, base.work)
    if cluster.devices[0].datasheet:
        notes.append(f"{cluster.devices[0].name}: {cluster.source}")
    return tuple(notes)

"""``--tensor-parallel auto``: measure a member of teams of several sizes, and choose the size of the fastest plan."""

from __future__ import annotations

import dataclasses

from autopipe.commands.measuring import ensure_profile
from autopipe.commands.planning.choose import (
    LEAST_GAIN,
    batch_of,
    choices_of,
    cluster_of,
    devices_of,
    search,
    space_of,
    with_averages,
)
from autopipe.commands.planning.request import Sizes, request_of
from autopipe.commands.settings import AUTO_TEAM, PlanSettings
from autopipe.commands.store import PlanRecord, Work
from autopipe.errors import AutopipeError, PlanError
from autopipe.ir import artifact
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.ir.teams.axis_sets import coverage
from autopipe.planning.requests import PlanRequest
from autopipe.workload.cutting.dimensions import Minibatch

MOST_MEMBERS = 8
"""The largest team that ``auto`` tries."""


def with_team(settings: PlanSettings, work: Work, sizes: Sizes, minibatch: Minibatch | None) -> PlanSettings:
    """Return the settings with a number of members in place of ``AUTO_TEAM``.

    The profile of the chosen size becomes that of the work directory. The others are stored next to it, so that they
    are measured once.

    Raises: PlanError of the smallest team if no size has a plan; the errors of ``ensure_profile``.
    """
    if settings.profile.model.team != AUTO_TEAM:
        return settings
    request, stored = request_of(settings), work.load(Plan, work.store.plan)
    record = work.load(PlanRecord, work.store.record)
    if stored is not None and record is not None:
        request = record.request.overlaid(request)
        if not settings.profile.model.is_given and not record.request.changes_to(request):
            return _of(settings, stored.team)
    profile, batch_size = _profile_of(1, settings, work, sizes, minibatch, request)
    candidates = _candidates(profile, request, work)
    best: tuple[float, int] | None = None
    refusal: PlanError | None = None
    for size in candidates:
        if size > 1:
            try:
                profile, _ = _profile_of(size, settings, work, sizes, minibatch, request)
            except AutopipeError as error:
                work.notes.append(f"teams of {size} were not considered: {error.what}")
                continue
        try:
            speed = _speed(profile, request, work, batch_size)
        except PlanError as error:
            refusal = refusal or error
            continue
        if best is None or speed > best[0] * (1 + LEAST_GAIN):
            best = speed, size
    if best is None:
        raise refusal or PlanError("no team has a plan")
    _restore(best[1], work)
    if len(candidates) > 1:
        tried = ", ".join(map(str, candidates))
        work.notes.append(f"--tensor-parallel auto: {best[1]} is the fastest of {tried}")
    return _of(settings, best[1])


def _of(settings: PlanSettings, size: int) -> PlanSettings:
    model = dataclasses.replace(settings.profile.model, team=size)
    if size == 1:
        model = dataclasses.replace(model, sequence=None)
    return dataclasses.replace(settings, profile=dataclasses.replace(settings.profile, model=model))


def _candidates(profile: Profile, request: PlanRequest, work: Work) -> list[int]:
    """Return the sizes to try: those that divide the devices of the innermost level, and for which axes are known."""
    devices = devices_of(request, profile)
    inner = cluster_of(request, devices, profile, work).levels[0].count
    sizes = [size for size in range(2, MOST_MEMBERS + 1) if devices % size == 0 and inner % size == 0]
    sharded = [size for size in sizes if coverage(profile.graph, size).axes]
    if sizes and not sharded:
        work.notes.append(
            f"--tensor-parallel auto: no parameter of {profile.graph.name} can be sharded over {sizes[0]} processes"
        )
    return [1, *sharded]


def _profile_of(
    size: int,
    settings: PlanSettings,
    work: Work,
    sizes: Sizes,
    minibatch: Minibatch | None,
    request: PlanRequest,
) -> tuple[Profile, int]:
    """Return the profile of a member of a team of this size, and the samples of a minibatch."""
    if work.store.profile_of_team(size).exists():
        _restore(size, work)
    options = _of(settings, size).profile
    model, profile = ensure_profile(options, work, sizes, minibatch=minibatch, may_count=request.of_datasheet)
    artifact.save(profile, work.store.profile_of_team(size))
    return profile, batch_of(model.workload, request, work)


def _restore(size: int, work: Work) -> None:
    profile = work.load(Profile, work.store.profile_of_team(size))
    if profile is not None:
        artifact.save(profile, work.store.profile)


def _speed(profile: Profile, request: PlanRequest, work: Work, batch_size: int) -> float:
    """Return the predicted samples per second of the best plan."""
    space, cluster = space_of(profile, request, work, batch_size)
    choices, shard = choices_of(request, space, profile, work), request.shard_optimizer != "never"
    plan, _ = search(with_averages(profile, request), cluster, choices, work.progress, shard=shard)
    return plan.predicted.samples_per_second

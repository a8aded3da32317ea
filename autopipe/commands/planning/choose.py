"""Make the plan of a request, or reuse the stored one. Determines the cluster, the batch size and the schedules."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopipe.commands.planning.request import request_of, unmeasured
from autopipe.commands.settings import PlanSettings, Progress
from autopipe.commands.store import Input, PlanRecord, Work, profile_digest, stale, team_inputs
from autopipe.errors import DoesNotFitError, PlanError, RunError, counted
from autopipe.ir import artifact
from autopipe.ir.cluster import Cluster, Links
from autopipe.ir.plan import Plan
from autopipe.ir.plan_fits_graph import refuse_disagreement
from autopipe.ir.profile import COUNTED, Profile
from autopipe.ir.tensor import DTYPE_BYTES
from autopipe.planning import PlanOptions, SearchProgress, make_best_plan
from autopipe.planning.clusters import by_datasheet, cluster_of_figures, this_machine
from autopipe.planning.cost.peaks import search_within_memory
from autopipe.planning.cost.predict import predict
from autopipe.planning.requests import PlanRequest
from autopipe.planning.search_space import Space, most_stages
from autopipe.planning.simulated_scores import simulator_score
from autopipe.planning.spilled.explain import with_offer
from autopipe.planning.teams import of_teams, on_cluster
from autopipe.runtime.context import refuse_stale_ties
from autopipe.schedules import REGISTRY, lines_of

if TYPE_CHECKING:  # it imports torch
    from autopipe.workload import Workload

# a relative gain below this is not an improvement, because the figures of a profile are less exact
LEAST_GAIN = 5e-4
# seconds before progress is shown
QUIET_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Chosen:
    """A plan and the search that found it."""

    plan: Plan
    record: PlanRecord  # what it was made from
    space: Space  # the plans that were considered
    seconds: float  # of the search
    every: bool = False  # it is the best plan of the complete space


def ensure_plan(workload: Workload, profile: Profile, settings: PlanSettings, work: Work) -> tuple[Plan, PlanRecord]:
    """Return the stored plan, or a new one if model, profile or options have changed. A note names the reason."""
    newer = request_of(settings)
    request, reason = newer, "no plan was stored"
    stored = work.load(Plan, work.store.plan)
    record = work.load(PlanRecord, work.store.record)
    if stored is not None and record is None:
        reason = f"{work.store.record.name} is missing"
    if stored is not None and record is not None:
        work.store.refuse_mismatch(stored, record)
        if stored.graph_digest == profile.graph.digest or not settings.profile.model.is_given:
            request = record.request.overlaid(newer)

        def cluster() -> Cluster:
            return cluster_of(request, ranks_of(request, profile), profile, work)

        reason = stale(plan_inputs(stored, record, profile, request, None if settings.resumed else cluster))
        if not reason:
            refuse_disagreement(stored, profile.graph)
            earlier = "".join(f"{option}, " for option in record.request.options_beyond(newer))
            note = f"plan of {counted(stored.num_processes, 'rank')} ({stored.schedule}) reused"
            work.notes.append(f"{note}: {earlier}from an earlier command" if earlier else note)
            if (request.batch_size or 0) > profile.batch_size:
                batch_of(workload, request, work)
            return stored, record
    chosen = choose_plan(profile, request, work, batch_of(workload, request, work))
    work.notes.append(f"planned {counted(len(chosen.plan.stages), 'stage')} in {chosen.seconds:.2f} s: {reason}")
    return chosen.plan, chosen.record


def plan_inputs(
    stored: Plan, record: PlanRecord, profile: Profile, request: PlanRequest, cluster: Callable[[], Cluster] | None
) -> Iterator[Input]:
    """Yield the inputs of a stored plan, compared with a profile, a request, and the cluster that ``cluster`` returns.

    ``cluster``: None for a run that is resumed, which keeps its plan whatever was measured since.
    """
    if stored.graph_digest != profile.graph.digest:
        yield from team_inputs(dataclasses.replace(stored.workload, team=stored.team), profile.workload)
    yield Input(stored.graph_digest, profile.graph.digest, "the model changed ({written} -> {now})")
    changes = ", ".join(record.request.changes_to(request))
    yield Input("", changes, "{now}")
    if cluster is None:
        return
    yield Input(record.profile_digest, profile_digest(profile), "the profile has changed")
    now = cluster()
    yield Input(record.cluster.levels, now.levels, "the links were measured again")
    yield Input(_cores(record.cluster), _cores(now), "its ranks have other cores ({written} -> {now})")


def _cores(cluster: Cluster) -> str:
    return f"{cluster.cores:g}" if cluster.cores else "their own"


def batch_of(workload: Workload, request: PlanRequest, work: Work) -> int:
    """Return the samples of a minibatch: the requested number, or that of the user's data.

    A note says if the first minibatch of the data has fewer samples than requested.

    Raises: the error of the data hook if it does not accept the requested number.
    """
    if request.batch_size is None:
        return workload.num_samples(workload.example_item(None))
    first = next(iter(workload.items(request.batch_size)), None)
    if first is not None and not workload.cutting.is_whole:
        samples = workload.num_samples(first)
        note = f"the data gives a minibatch of {samples} samples, but --batch-size is {request.batch_size}"
        if samples < request.batch_size and note not in work.notes:
            work.notes.append(note)
    return request.batch_size


def choose_plan(profile: Profile, request: PlanRequest, work: Work, batch_size: int) -> Chosen:
    """Make the plan of a request, and write it with its record. Ctrl-C ends the search with the best plan so far.

    Raises: PlanError if no plan exists, or if the stages of a tied parameter would read different versions of it.
    """
    space, cluster = space_of(profile, request, work, batch_size)
    start = time.perf_counter()
    choices = choices_of(request, space, profile, work)
    shard = request.shard_optimizer != "never"
    plan, search_progress = search(with_averages(profile, request), cluster, choices, work.progress, shard=shard)
    refuse_stale_ties(plan, profile.graph, plan.request())
    seconds = time.perf_counter() - start
    if search_progress.stopped:
        work.notes.append(
            f"interrupted: the best plan of {search_progress.tried} of about {search_progress.total} searches"
        )
    if plan.num_ranks < cluster.num_ranks:
        cores = f" (the cores of this machine suffice for {cluster.cores:.3g} at a time)" if cluster.cores else ""
        work.notes.append(f"{plan.notes[0]}{cores}")  # how many ranks stay unused
    if request.num_microbatches is None is request.microbatch_size:
        work.notes.extend(filter(None, [unmeasured(profile, batch_size)]))
    record = PlanRecord(plan.digest, profile_digest(profile), request, cluster)
    artifact.save(plan, work.store.plan)
    artifact.save(record, work.store.record)
    return Chosen(plan, record, space, seconds, not search_progress.stopped and space.covered_by(choices))


def space_of(profile: Profile, request: PlanRequest, work: Work, batch_size: int) -> tuple[Space, Cluster]:
    """Return the plans to consider for a request, and the cluster they are for.

    A loss that microbatches change has one microbatch if the request has no number of them.
    """
    if profile.coupling.wants_whole and request.num_microbatches is None is request.microbatch_size:
        request = dataclasses.replace(request, num_microbatches=1)
    num_ranks = ranks_of(request, profile)
    cluster = cluster_of(request, num_ranks, profile, work)
    return Space.of(request, num_ranks, batch_size, links_known=cluster.source != "assumed"), cluster


def with_averages(profile: Profile, request: PlanRequest) -> Profile:
    """Return the profile with the bytes of averaged weights added to the optimizer state, if they are requested."""
    trained = [spec for spec in profile.graph.parameters.values() if spec.requires_grad]
    whole = sum(spec.num_bytes({}) for spec in trained)
    if not request.averages or not whole:
        return profile
    # averages are float32, of float64 parameters float64
    averages = sum(spec.num_bytes({}) * max(4 // DTYPE_BYTES[spec.dtype], 1) for spec in trained)
    return dataclasses.replace(profile, optimizer_bytes_per_byte=profile.optimizer_bytes_per_byte + averages / whole)


def search(
    profile: Profile, cluster: Cluster, choices: tuple[PlanOptions, ...], progress: Progress, *, shard: bool = False
) -> tuple[Plan, SearchProgress]:
    """Return the plan with the shortest simulated step, and the progress of the search.

    ``shard``: replicas may divide the optimizer state of their stage. Plans in which they do are considered if memory
    may be what limits the others.

    Raises: PlanError if there is no plan, or the profile has no times; ScheduleError if no schedule can run the plan.
    """
    search_progress, profile = SearchProgress(later(progress)), on_cluster(profile, cluster)
    if profile.device.kind == COUNTED:
        raise PlanError(
            f"the profile of {profile.graph.name} has no times, because it was taken with --estimate",
            remedy="name the device to plan for: --device-name H100-SXM, or datasheet in a cluster file",
        )
    score = simulator_score(profile, cluster, choices)

    def best_of(room: Cluster, among: Sequence[PlanOptions]) -> Plan:
        return make_best_plan(profile, room, among, score=score, progress=search_progress, least_gain=LEAST_GAIN)

    def find(room: Cluster) -> Plan:
        if not shard or not any(_takes_much_of(device.memory_bytes, profile) for device in room.devices):
            return best_of(room, choices)
        try:
            complete = best_of(room, choices)
        except PlanError as refusal:
            with contextlib.suppress(PlanError):
                return best_of(room, sharded(choices))
            raise refusal from None
        other = None
        with contextlib.suppress(PlanError):
            if not search_progress.stopped and (same := sharded(choices, complete.schedule)):
                other = best_of(room, same)
        least = complete.predicted.samples_per_second * (1 + LEAST_GAIN)
        return complete if other is None or other.predicted.samples_per_second <= least else other

    try:
        plan = search_within_memory(profile, cluster, find, lambda: search_progress.stopped)
    except DoesNotFitError as refusal:
        raise with_offer(refusal, profile, cluster, choices[0]) from None
    if not math.isfinite(plan.predicted.step_seconds):
        predict(plan, profile, cluster)  # raises the ScheduleError that names the broken rule
    return plan, search_progress


def _takes_much_of(memory_bytes: int, profile: Profile) -> bool:
    """Return whether the weights, gradients and optimizer state of the model take an eighth of a device's memory."""
    return 0 < memory_bytes < 8 * profile.trained_bytes * (2 + profile.optimizer_bytes_per_byte)


def sharded(choices: Sequence[PlanOptions], schedule: str = "") -> tuple[PlanOptions, ...]:
    """Return the options with replicas, of one schedule if it is given, with a divided optimizer state."""
    return tuple(
        dataclasses.replace(options, sharded=True)
        for options in choices
        if (options.may_replicate or options.replicas > 1) and schedule in ("", options.schedule)
    )


def later(progress: Progress, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Return progress that is silent for the first ``QUIET_SECONDS``."""
    start = clock()

    def report(what: str, fraction: float) -> None:
        if clock() - start > QUIET_SECONDS:
            progress(f"planning: {what}", fraction)

    return report


def choices_of(request: PlanRequest, space: Space, profile: Profile, work: Work) -> tuple[PlanOptions, ...]:
    """Return the options to search: also with replicas, unless the request or the model excludes them.

    Raises: PlanError if there are more ranks than stages and replicas are excluded.
    """
    ranks, max_stages = space.unreplicated[0].num_ranks, most_stages(profile)
    if request.replicas is not None:
        return space.choices(request.replicas)
    averaged = [name for node in profile.graph.nodes for name in node.buffers_written]
    if not space.replicated or ranks == 1:
        return space.unreplicated
    if averaged and not (request.of_other_devices and ranks > max_stages):
        if ranks > max_stages:
            raise PlanError(
                f"{ranks} stages requested, but the model has {max_stages - 1} legal cuts: at most {max_stages} stages",
                where=f"graph of {profile.graph.name}",
                remedy=f"use {max_stages} ranks or fewer, or let stages run on several ranks: --replicas auto",
            )
        work.notes.append(
            f"planned without replicas, because they would average a buffer that the forward writes ({averaged[0]}); "
            "--replicas auto allows them"
        )
        return (*space.unreplicated, *space.fewer)
    if ranks > max_stages:
        work.notes.append(f"{ranks} ranks, and the model has {max_stages} stages at most: planned with replicas")
        return space.replicated
    return space.choices("auto")


def ranks_of(request: PlanRequest, profile: Profile) -> int:
    """Return the number of ranks: of the schedule file, --gpus, the cluster, or the GPUs of this machine.

    If ranks are teams, it is the number of teams.

    Raises: RunError if none of them gives it; PlanError if schedule file and --gpus differ, or teams do not divide it.
    """
    team = profile.workload.team
    if request.grid is not None:
        rows = len(lines_of(request.grid))
        if request.gpus not in (None, rows * team):
            raise PlanError(
                f"the schedule file has {counted(rows, 'row')}, one per rank{_of_team(team)}, but --gpus is "
                f"{request.gpus}",
                remedy=f"use --gpus {rows * team}, or a file with another number of rows",
            )
        return rows
    devices = devices_of(request, profile)
    if devices % team:
        raise PlanError(
            f"{counted(devices, 'device')} cannot be divided into teams of {team}",
            remedy=f"use --gpus {max(devices // team, 1) * team}, or another --tensor-parallel",
        )
    return devices // team


def _of_team(team: int) -> str:
    return f" of {team} members" if team > 1 else ""


def devices_of(request: PlanRequest, profile: Profile) -> int:
    """Return the number of devices. Raises: RunError if it is not known."""
    if request.gpus is not None:
        return request.gpus
    if request.schedule is not None and request.schedule in REGISTRY and REGISTRY[request.schedule].spills:
        return profile.workload.team
    if request.cluster is not None:
        return request.cluster.num_ranks
    if profile.device.kind == "cuda":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.device_count()
    raise RunError(
        "number of ranks not specified, and no stored plan exists",
        remedy="add --gpus N (on a CPU: N processes), or run autopipe plan TARGET --gpus N first",
    )


def cluster_of(request: PlanRequest, num_ranks: int, profile: Profile, work: Work) -> Cluster:
    """Return the cluster: of a file, of figures, or this machine with its measured links.

    Its ranks are those of the profile: teams, if it is that of a member.

    Raises: PlanError if its devices cannot be divided into teams.
    """
    team = profile.workload.team
    return of_teams(_cluster_of_devices(request, num_ranks * team, profile, work), team)


def _cluster_of_devices(request: PlanRequest, num_devices: int, profile: Profile, work: Work) -> Cluster:
    if request.cluster is not None:
        return by_datasheet(request.cluster, profile)
    links = work.load(Links, work.store.links)
    if request.of_other_devices:
        given = request.gpu_memory_bytes, request.link, request.device_name
        cluster = cluster_of_figures(num_devices, profile, *given, links)
    else:
        cluster = this_machine(num_devices, profile.device, links)
    return dataclasses.replace(cluster, cores=0.0) if work.elsewhere else cluster

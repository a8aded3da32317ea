"""Simulate the stored plan, under its own schedule or another. No torch, so that the command answers at once."""

from __future__ import annotations

import dataclasses
import math
import shlex
from pathlib import Path

from autopipe.commands.locks import only_one
from autopipe.commands.planning.choose import with_averages
from autopipe.commands.planning.request import request_of
from autopipe.commands.settings import (
    WORK_DIRECTORY,
    ModelSettings,
    OrderSettings,
    PlanSettings,
    ProfileSettings,
    Progress,
)
from autopipe.commands.store import Work
from autopipe.errors import PlanError, counted
from autopipe.ir import artifact
from autopipe.ir.plan import Plan, bytes_by_rank
from autopipe.ir.plan_fits_graph import refuse_disagreement
from autopipe.planning.cost.peaks import memory_shortfall, with_peaks
from autopipe.planning.cost.predict import predict, schedule_of, timeline_of
from autopipe.planning.requests import PlanRequest, schedule_flag
from autopipe.planning.search_space import schedules_with_options
from autopipe.planning.teams import on_cluster
from autopipe.report.perfetto import chrome_trace
from autopipe.report.results import SimulateResult
from autopipe.schedules import layout_of, render


def simulate(
    work_dir: Path = WORK_DIRECTORY,
    schedule: str | None = None,
    progress: Progress | None = None,
    order: OrderSettings | None = None,
    trace: Path | None = None,
) -> SimulateResult:
    """Simulate the stored plan, or the plan under another ``schedule``, and write timeline.json.

    The peak memory of the stages follows from the simulated schedule. ``trace``: a file for Perfetto.
    """
    with only_one(work_dir, "simulates"):
        store = Work.begin(work_dir, progress).store.newest
        plan, record = store.stored_plan()
        profile = on_cluster(store.stored_profile(), record.cluster)
        refuse_disagreement(plan, profile.graph)
        requested = PlanSettings(ProfileSettings(ModelSettings()), schedule=schedule, order=order or OrderSettings())
        plan, notes = with_schedule(plan, request_of(requested))
        order_of_work = schedule_of(plan)
        timeline = timeline_of(plan, profile, record.cluster)
        # this takes less time than the timeline, so the limit ``most`` is not needed
        plan = with_peaks(plan, with_averages(profile, record.request), most=math.inf)
        plan = dataclasses.replace(plan, predicted=predict(plan, profile, record.cluster))
        used = bytes_by_rank(plan.stages)
        timeline = dataclasses.replace(timeline, peak_bytes=tuple(used[rank] for rank in range(plan.num_ranks)))
        artifact.save(timeline, store.timeline)
        if trace is not None:
            artifact.write_text(trace, chrome_trace(timeline))
        return SimulateResult(
            plan,
            record.cluster,
            timeline,
            render(order_of_work),
            str(store.timeline),
            (*notes, *filter(None, [profile.coupling.text(plan.num_microbatches)])),
            trace="" if trace is None else str(trace),
            overlaps=any(order_of_work.staleness),
            schedule_options="" if plan.digest == record.plan_digest else schedule_flags(plan, requested.order.file),
            memory_shortfall=memory_shortfall(plan, record.cluster),
        )


def with_schedule(plan: Plan, request: PlanRequest) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan with the requested schedule, and notes for the user.

    Raises: PlanError if the schedule does not have an option, or its layout does not match the stages of the plan. The
    schedule itself raises ScheduleError for layouts that it does not support.
    """
    name = request.schedule if request.schedule not in (None, "auto") else plan.schedule
    schedules_with_options((str(name),), request)
    options = dict(request.schedule_options)
    if (
        name == plan.schedule
        and not options
        and request.stages_per_rank is None
        and request.grid in (None, plan.schedule_text)
    ):
        return plan, ()
    if name == plan.schedule:
        options = {**plan.schedule_options, **options}
        if request.vertical_sync is False:
            options.pop("vertical_sync", None)
    ranks = plan.stage_ranks
    if name == "custom":
        ranks = _ranks_of_grid(plan, request)
    elif request.stages_per_rank is not None:
        ranks = _round_robin(plan, request.stages_per_rank)
        options["stages_per_rank"] = request.stages_per_rank
    stages = tuple(dataclasses.replace(stage, ranks=own) for stage, own in zip(plan.stages, ranks, strict=True))
    other = dataclasses.replace(
        plan,
        stages=stages,
        num_ranks=1 + max(rank for own in ranks for rank in own),
        schedule=str(name),
        schedule_options=options,
        schedule_text=request.grid or "",
    )
    what = ", ".join([other.schedule, *(f"{option} {value}" for option, value in options.items())])
    note = f"the plan is for {plan.schedule}; simulated with {what}, the same stages"
    return other, (note + ("" if ranks == plan.stage_ranks else f" on {counted(other.num_ranks, 'rank')}"),)


def schedule_flags(plan: Plan, grid: Path | None) -> str:
    """Return the command-line options for a plan's schedule. ``grid``: the schedule file, if it has one."""
    if grid is not None:
        return f"--schedule-file {shlex.quote(str(grid))}"
    words = ["--schedule", plan.schedule]
    for option, value in plan.schedule_options.items():
        if flag := schedule_flag(option):  # the others are chosen by the planner
            words += [flag] if option == "vertical_sync" else [flag, str(value)]
    return " ".join(words)


def _round_robin(plan: Plan, per_rank: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of stages that are dealt out in turn. If all have the same number of replicas, they keep it."""
    num_stages, counts = len(plan.stages), {stage.replicas for stage in plan.stages}
    d = max(counts) if len(counts) == 1 else 1
    if num_stages % per_rank:
        raise PlanError(
            f"the {counted(num_stages, 'stage')} of the plan cannot be distributed with {per_rank} on each rank",
            remedy=f"autopipe plan --gpus N --schedule interleaved --stages-per-rank {per_rank}",
        )
    groups = [tuple(range(first * d, (first + 1) * d)) for first in range(num_stages // per_rank)]
    return tuple(groups[stage % len(groups)] for stage in range(num_stages))


def _ranks_of_grid(plan: Plan, request: PlanRequest) -> tuple[tuple[int, ...], ...]:
    if request.grid is None:
        raise PlanError("--schedule custom needs a schedule file", remedy="--schedule-file FILE")
    ranks, count = layout_of(request.grid)
    if (len(ranks), count) != (len(plan.stages), plan.num_microbatches):
        raise PlanError(
            f"the schedule file has {counted(len(ranks), 'stage')} and {count} microbatches, but the plan has "
            f"{len(plan.stages)} and {plan.num_microbatches}",
            remedy="autopipe plan --schedule-file FILE",
        )
    return ranks

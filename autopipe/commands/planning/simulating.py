"""Simulate the stored plan. No torch, so that the command answers at once."""

from __future__ import annotations

import dataclasses
import math
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
from autopipe.ir import artifact
from autopipe.ir.agreement import refuse_disagreement
from autopipe.ir.plan import bytes_by_rank
from autopipe.planning.cost.peaks import memory_shortfall, with_peaks
from autopipe.planning.cost.predict import predict, schedule_of, timeline_of
from autopipe.planning.reschedule import schedule_flags, with_schedule
from autopipe.planning.teams import on_cluster
from autopipe.report.perfetto import chrome_trace
from autopipe.report.results import SimulateResult
from autopipe.schedules import render


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

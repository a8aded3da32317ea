"""A request becomes a plan: which cluster, batch and schedules are meant; and whether the stored plan answers it."""

from __future__ import annotations

import time

from autopipe.errors import PlanError, RunError
from autopipe.ir import artifact
from autopipe.ir.cluster import Cluster
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.planning import NEEDS, PlanOptions, comparison, explain, make_plan
from autopipe.schedules import REGISTRY
from autopipe.workflow.clusters import cluster_of_figures, this_machine
from autopipe.workflow.predict import predict
from autopipe.workflow.requests import PlanRequest
from autopipe.workflow.settings import PlanSettings
from autopipe.workflow.store import PlanRecord, Work, profile_digest
from autopipe.workload import Workload

# where a schedule is to be chosen: the first one wins a tie, and needs less memory than gpipe
_AUTO_FIRST = "1f1b"


def ensure_plan(workload: Workload, found: Profile, settings: PlanSettings, work: Work) -> tuple[Plan, PlanRecord]:
    """Return the stored plan, or a new one where model, profile or options differ; a note says which."""
    said = PlanRequest.of(settings)
    request, reason = said, "there was no plan"
    stored = work.found(Plan, work.store.plan)
    record = work.found(PlanRecord, work.store.record)
    if stored is not None and record is not None and record.plan_digest == stored.digest:
        same_model = stored.graph_digest == found.graph.digest
        if same_model or not settings.profile.model.said:
            request = record.request.overlaid(said)
        changes = record.request.changes_to(request)
        if not same_model:
            reason = f"the model changed ({stored.graph_digest} -> {found.graph.digest})"
        elif changes:
            reason = ", ".join(changes)
        elif record.profile_digest != profile_digest(found):
            reason = "the profile is newer"
        else:
            work.notes.append(f"plan of {stored.num_ranks} ranks ({stored.schedule}) taken from before")
            return stored, record
    made, record, seconds = choose_plan(workload, found, request, work)
    work.notes.append(f"planned {len(made.stages)} stages in {seconds:.2f} s: {reason}")
    return made, record


def choose_plan(workload: Workload, found: Profile, request: PlanRequest, work: Work) -> tuple[Plan, PlanRecord, float]:
    """Make the plan of a request and write it and its record. Returns also the seconds of the search."""
    num_ranks = _num_ranks(request, found)
    cluster = _cluster(request, num_ranks, found)
    batch_size = request.batch_size or workload.num_samples(workload.example_item(None))
    if request.batch_size is not None:
        next(iter(workload.items(request.batch_size)), None)  # a data hook that takes none must say so now
    work.progress("planning", 0.0)
    plans: list[Plan] = []
    refusals: list[PlanError] = []
    start = time.perf_counter()
    for name in _schedules(request.schedule or "auto"):
        options = options_of(request, name, num_ranks, batch_size)
        try:
            plans.append(make_plan(found, cluster, options, score=lambda p: predict(p, found, cluster)))
        except PlanError as error:
            refusals.append(error)
    seconds = time.perf_counter() - start
    if not plans:
        raise refusals[0]
    # the first of equals: what is faster by a rounding error is not better
    made = min(plans, key=lambda p: round(p.predicted.step_seconds / plans[0].predicted.step_seconds, 3))
    record = PlanRecord(made.digest, profile_digest(found), request, cluster)
    artifact.save(made, work.store.plan)
    artifact.save(record, work.store.record)
    return made, record, seconds


def options_of(request: PlanRequest, schedule: str, num_ranks: int, batch_size: int) -> PlanOptions:
    """Return the planner's options of a request."""
    return PlanOptions(
        num_ranks=num_ranks,
        batch_size=batch_size,
        num_microbatches=request.num_microbatches,
        microbatch_size=request.microbatch_size,
        schedule=schedule,
        recompute=request.recompute or "auto",
    )


def explanation(made: Plan, found: Profile, record: PlanRecord) -> tuple[str, ...]:
    """Return why a plan is as it is, and whether a pipeline pays at all."""
    options = options_of(record.request, made.schedule, made.num_ranks, made.batch_size)
    others = comparison(found, record.cluster, options, score=lambda p: predict(p, found, record.cluster))
    return (*explain(made, found, record.cluster, options).lines(), others.verdict)


def _schedules(name: str) -> tuple[str, ...]:
    """Return the schedules to try.

    ``auto``: those that the planner knows and that give plain training's result with a stage a rank. One that splits
    the backward is not among them: the profile has no times of the halves.
    """
    if name != "auto":
        return (name,)
    kinds = [kind for kind in REGISTRY.values() if kind.synchronous and kind.name in NEEDS]
    plain = [kind.name for kind in kinds if not kind.several_stages and not kind.splits_backward]
    return tuple(sorted(plain, key=lambda name: name != _AUTO_FIRST))


def _num_ranks(request: PlanRequest, found: Profile) -> int:
    if request.gpus is not None:
        return request.gpus
    if request.cluster is not None:
        return request.cluster.num_ranks
    if found.device.kind == "cuda":
        import torch

        return torch.cuda.device_count()
    raise RunError(
        "nobody said how many ranks, and there is no plan yet",
        remedy="add --gpus N (on a CPU: N processes), or run autopipe plan TARGET --gpus N first",
    )


def _cluster(request: PlanRequest, num_ranks: int, found: Profile) -> Cluster:
    if request.cluster is not None:
        return request.cluster
    if request.gpu_memory_bytes is not None or request.link is not None:
        return cluster_of_figures(num_ranks, found.device, request.gpu_memory_bytes, request.link)
    return this_machine(num_ranks, found.device)

"""Plans that cannot be right, refused with the numbers and the smallest change that would help, computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from autopipe.errors import PlanError, counted
from autopipe.ir.cluster import Cluster
from autopipe.ir.module_names import stage_modules
from autopipe.planning.options import PlanOptions
from autopipe.planning.search.problem import Problem
from autopipe.planning.search.unreplicated import unreplicated_cuts
from autopipe.schedules.kind import ScheduleKind
from autopipe.units import in_bytes_rounded_up, in_distinct_bytes


def check_stage_count(num_stages: int, num_legal: int, name: str) -> None:
    """Refuse more stages than the graph can be cut into.

    Raises: PlanError.
    """
    if num_stages > num_legal + 1:
        raise PlanError(
            f"{num_stages} stages asked for, but the model has {num_legal} legal cuts: {num_legal + 1} stages at most",
            where=f"graph of {name}",
            remedy=f"use {num_legal + 1} ranks or fewer (stages_per_rank counts too)",
        )


def microbatch_count(options: PlanOptions) -> int | None:
    """Return the number of microbatches that the options fix, or None when the planner may choose.

    Raises: PlanError when the batch is too small for it, or both options contradict each other.
    """
    m, size, batch = options.num_microbatches, options.microbatch_size, options.batch_size
    if size is not None:
        needed = math.ceil(batch / size)
        if size > batch:
            raise PlanError(
                f"a microbatch of {counted(size, 'sample')} is larger than the batch of {batch}",
                remedy=f"use --microbatch-size {batch} or smaller, or --batch-size {size} or larger",
            )
        if m is not None and m != needed:
            raise PlanError(
                f"{m} microbatches of {size} samples do not make a batch of {batch}",
                remedy=f"leave one of the three out ({needed} microbatches of {size} do)",
            )
        m = needed
    if m is not None and m > batch:
        raise PlanError(
            f"a batch of {counted(batch, 'sample')} cannot be cut into {m} microbatches: each needs at least one",
            remedy=f"use --batch-size {m} or larger, or --num-microbatches {batch} or fewer",
        )
    return m


def check_microbatches(kind: ScheduleKind, num_stages: int, num_microbatches: int | None, batch_size: int) -> None:
    """Refuse fewer microbatches than the schedule runs with; None stands for as many as the batch has samples.

    Raises: PlanError.
    """
    least = kind.least_microbatches(num_stages)
    given = batch_size if num_microbatches is None else num_microbatches
    if given < least:
        cause = f"a batch of {batch_size} gives {given}" if num_microbatches is None else f"{given} are planned"
        raise PlanError(
            f"schedule {kind.name!r} with {num_stages} stages needs at least {least} microbatches, and {cause}",
            remedy=f"use {least} microbatches (a batch of {least} samples or more), fewer ranks, or another schedule",
        )


def does_not_fit(problem: Problem) -> PlanError:
    """Return the error for a problem whose stages fit in no way: which stage, by how much, and what would fit."""
    if problem.options.may_replicate:
        # the straight plans on some of the ranks are among those that do not fit, and what makes one fit helps
        ranks = min(problem.options.num_ranks, problem.tables.num_atoms)
        lines = [_straight(problem, ranks >> k) for k in range(ranks.bit_length())]
        problem = min(lines, key=lambda line: _least_overfull(line)[0])
    stages = problem.options.num_stages
    over, starts = _least_overfull(problem)
    edges = (0, *starts, problem.tables.num_atoms)
    overflow = [float(problem.overflow_table(k, stages)[edges[k], edges[k + 1]]) for k in range(stages)]
    worst = overflow.index(max(overflow))
    needed = overflow[worst] + problem.limit(worst)
    graph, start, stop = problem.profile.graph, *(problem.tables.edges[edges[worst + k]] for k in (0, 1))
    name = stage_modules(graph, start, stop) or f"{graph.nodes[start].name} .. {graph.nodes[stop - 1].name}"
    device = problem.device_of(worst)
    remedy = next((text for text, change in _changes(problem) if fits(change)), "")
    if not remedy:
        total = device.memory_bytes + over * device.memory_bytes / problem.limit(worst)
        remedy = (
            f"no smaller change was found that fits: use devices with {in_bytes_rounded_up(total)} and room for "
            "messages, or more ranks with a larger model cut finer"
        )
    texts = in_distinct_bytes(needed, problem.limit(worst))
    return PlanError(
        f"stage {worst} needs {texts[0]} and {texts[1]} are available, in the plan that exceeds memory least",
        where=f"stage {worst} of {stages} ({name}) on {device.name}, "
        f"{problem.num_microbatches} microbatches of {problem.microbatch_size}, schedule {problem.kind.name}",
        remedy=remedy,
    )


def _straight(problem: Problem, num_ranks: int) -> Problem:
    return dataclasses.replace(
        problem, options=dataclasses.replace(problem.options, may_replicate=False, num_ranks=num_ranks)
    )


def _least_overfull(problem: Problem) -> tuple[float, tuple[int, ...]]:
    """Return by how many bytes the least overfull straight plan is over the limit, and where it is cut."""
    stages = problem.options.num_stages
    return unreplicated_cuts(problem.tables.num_atoms, stages, lambda k: problem.overflow_table(k, stages))


def fits(problem: Problem) -> bool:
    """Return whether any cuts fit the memory."""
    stages = problem.options.num_stages
    over, starts = _least_overfull(problem)
    return over <= 0 and (stages == 1 or bool(starts))


def _changes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield changes, small ones first: recompute, smaller microbatches, both, more ranks, more ranks with recompute."""
    options = problem.options
    recompute = dataclasses.replace(options, recompute="always")
    can_recompute = options.recompute == "never"
    if can_recompute:
        yield "recompute the activations (--recompute auto)", dataclasses.replace(problem, options=recompute)
    if options.stage_ranks:
        return  # the schedule's own text says how many microbatches and ranks there are
    counts = sorted({min(problem.num_microbatches * 2**k, options.batch_size) for k in range(1, 31)})
    for count in counts if problem.num_microbatches < options.batch_size else []:
        size = math.ceil(options.batch_size / count)
        smaller = dataclasses.replace(options, num_microbatches=count, microbatch_size=None)
        yield f"use --microbatch-size {size}", dataclasses.replace(problem, options=smaller, num_microbatches=count)
        if can_recompute:
            both = dataclasses.replace(smaller, recompute="always")
            text = f"use --microbatch-size {size} and --recompute auto"
            yield text, dataclasses.replace(problem, options=both, num_microbatches=count)
    if len(problem.cluster.devices) > 1:
        return
    for ranks in range(options.num_ranks + 1, problem.tables.num_atoms // options.stages_per_rank + 1):
        if problem.kind.least_microbatches(ranks * options.stages_per_rank) > problem.num_microbatches:
            return
        for base, extra in ((options, ""), (recompute, " and --recompute auto"))[: 2 if can_recompute else 1]:
            change = dataclasses.replace(base, num_ranks=ranks)
            cluster = _grown(problem.cluster, ranks)
            yield f"use {ranks} ranks{extra}", dataclasses.replace(problem, options=change, cluster=cluster)


def _grown(cluster: Cluster, num_ranks: int) -> Cluster:
    """Return the cluster, its outermost level widened until it has the ranks."""
    if cluster.num_ranks >= num_ranks:
        return cluster
    outer = cluster.levels[-1]
    inner = cluster.num_ranks // outer.count
    wider = dataclasses.replace(outer, count=math.ceil(num_ranks / inner))
    return dataclasses.replace(cluster, levels=(*cluster.levels[:-1], wider))

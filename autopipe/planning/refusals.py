"""Errors for plans that are invalid or do not fit, with the numbers and the smallest change that would help."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from autopipe.errors import DoesNotFitError, PlanError, counted
from autopipe.ir.cluster import MOST_RANKS, Cluster
from autopipe.ir.module_names import stage_modules
from autopipe.planning.options import PlanOptions
from autopipe.planning.search.problem import Problem
from autopipe.planning.search.unreplicated import unreplicated_cuts
from autopipe.schedules.kind import ScheduleKind
from autopipe.units import in_bytes_rounded_up, in_distinct_bytes


def check_stage_count(num_stages: int, num_legal: int, name: str) -> None:
    """Check that the graph can be cut into this many stages. Raises: PlanError."""
    if num_stages > num_legal + 1:
        raise PlanError(
            f"{num_stages} stages requested, but the model has {num_legal} legal cuts: at most {num_legal + 1} stages",
            where=f"graph of {name}",
            remedy=f"use {counted(num_legal + 1, 'rank')}{' or fewer' if num_legal else ''} "
            "(--stages-per-rank multiplies the stages)",
        )


def microbatch_count(options: PlanOptions) -> int | None:
    """Return the number of microbatches that the options determine, or None if the planner chooses it.

    Raises: PlanError if the batch is too small for it, or the options contradict each other.
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
                remedy=f"omit one of the three ({needed} microbatches of {size} do)",
            )
        m = needed
    if m is not None and m > batch:
        raise PlanError(
            f"a batch of {counted(batch, 'sample')} cannot be cut into {m} microbatches: each needs at least one",
            remedy=f"use --batch-size {m} or larger, or --num-microbatches {batch} or fewer",
        )
    return m


def check_microbatches(kind: ScheduleKind, num_stages: int, num_microbatches: int | None, batch_size: int) -> None:
    """Check that there are enough microbatches for the schedule. ``num_microbatches`` None: one per sample.

    Raises: PlanError.
    """
    least = kind.least_microbatches(num_stages)
    given = batch_size if num_microbatches is None else num_microbatches
    if given < least:
        cause = f"a batch of {batch_size} has {given}" if num_microbatches is None else f"{given} are requested"
        raise PlanError(
            f"schedule {kind.name!r} with {num_stages} stages needs at least {least} microbatches, but {cause}",
            remedy=f"use {least} microbatches (a batch of {least} samples or more), fewer ranks, or another schedule",
        )


def check_units(problem: Problem) -> None:
    """Check that stages can be recomputed by block if that is requested. Raises: PlanError."""
    if problem.options.recompute != "block":
        return
    if problem.kind.splits_backward:
        raise PlanError(
            f"--recompute block does not work with {problem.kind.name}: it splits the backward, and the second half "
            "would run every unit once more for each weight",
            remedy="--recompute stage, or --schedule 1f1b",
        )
    if not problem.atoms.units.spans:
        raise PlanError(
            "--recompute block finds no parts of the model that it could run again one at a time to save memory",
            where=f"graph of {problem.profile.graph.name}",
            remedy="--recompute stage",
        )


def does_not_fit(problem: Problem) -> DoesNotFitError:
    """Return the error for a problem without a plan that fits: the stage, the missing bytes, and what would fit."""
    if problem.options.may_replicate:
        # an unreplicated plan on some of the ranks is one of the plans that do not fit: what makes it fit helps
        ranks = min(problem.options.num_ranks, problem.tables.num_atoms)
        lines = [_unreplicated(problem, ranks >> k) for k in range(ranks.bit_length())]
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
            f"no smaller change fits: use devices with {in_bytes_rounded_up(total)} and room for "
            "messages, or more ranks and a model that can be cut into more stages"
        )
    texts = in_distinct_bytes(needed, problem.limit(worst))
    return DoesNotFitError(
        f"stage {worst} needs {texts[0]}, but {texts[1]} are available, in the plan that exceeds memory least",
        where=f"stage {worst} of {stages} ({name}) on {device.name}, "
        f"{counted(problem.num_microbatches, 'microbatch')} of {problem.microbatch_size}, schedule {problem.kind.name}",
        remedy=remedy,
    )


def _unreplicated(problem: Problem, num_ranks: int) -> Problem:
    return dataclasses.replace(
        problem, options=dataclasses.replace(problem.options, may_replicate=False, num_ranks=num_ranks)
    )


def _least_overfull(problem: Problem) -> tuple[float, tuple[int, ...]]:
    """Return the unreplicated plan that exceeds memory least: the bytes over the limit, and its cuts."""
    stages = problem.options.num_stages
    return unreplicated_cuts(problem.tables.num_atoms, stages, lambda k: problem.overflow_table(k, stages))


def fits(problem: Problem) -> bool:
    """Return whether an unreplicated plan fits the memory."""
    stages = problem.options.num_stages
    over, starts = _least_overfull(problem)
    return over <= 0 and (stages == 1 or bool(starts))


def _changes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield changes, small ones first: recompute, smaller microbatches, both, more ranks, more ranks with recompute.

    Each is a text and the changed problem.
    """
    options = problem.options
    recompute = dataclasses.replace(options, recompute="always")
    can_recompute = options.recompute == "never"
    if can_recompute:
        yield "recompute the activations (--recompute auto)", dataclasses.replace(problem, options=recompute)
    if options.stage_ranks:
        return  # the schedule's text determines the numbers of microbatches and ranks
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
    d, v = options.replicas, options.stages_per_rank
    most = min(problem.tables.num_atoms // v * d, _most_ranks(problem.cluster))
    for ranks in range(options.num_ranks + d, most + 1, d):
        if problem.kind.least_microbatches(ranks // d * v) > problem.num_microbatches:
            return
        for base, extra in ((options, ""), (recompute, " and --recompute auto"))[: 2 if can_recompute else 1]:
            change = dataclasses.replace(base, num_ranks=ranks)
            cluster = _grown(problem.cluster, ranks)
            yield f"use {ranks} ranks{extra}", dataclasses.replace(problem, options=change, cluster=cluster)


def _most_ranks(cluster: Cluster) -> int:
    """Return the most ranks of a cluster whose outermost level is widened."""
    inner = cluster.num_ranks // cluster.levels[-1].count
    return MOST_RANKS // inner * inner


def _grown(cluster: Cluster, num_ranks: int) -> Cluster:
    """Return the cluster with at least this many ranks: its outermost level is widened."""
    if cluster.num_ranks >= num_ranks:
        return cluster
    outer = cluster.levels[-1]
    inner = cluster.num_ranks // outer.count
    wider = dataclasses.replace(outer, count=math.ceil(num_ranks / inner))
    return dataclasses.replace(cluster, levels=(*cluster.levels[:-1], wider))

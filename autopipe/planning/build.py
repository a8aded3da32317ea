"""``build_plan``: from the stages that a search chose to a ``Plan`` with names, boundaries, ties and a prediction."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.ir.module_names import stage_modules
from autopipe.ir.plan import Boundary, Plan, Prediction, Stage
from autopipe.planning.cost.byte_sums import StageTerms
from autopipe.planning.cost.ownership import State, check_every_parameter, find_ties, state_of_stages, unused_state
from autopipe.planning.search.problem import Problem
from autopipe.units import in_short_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageChoice:
    """One stage as the search chose it."""

    start: int  # the position of its first node
    stop: int  # the position behind its last node
    ranks: tuple[int, ...]
    recompute: str  # one of ``RECOMPUTE_MODES``
    in_flight: int  # microbatches in flight on each rank
    versions: int  # weight versions
    seconds: float  # per microbatch of one replica, with transfers and the all-reduce
    waiting: int = 0  # weight halves of backwards that wait


def unreplicated_choices(problem: Problem, starts: Sequence[int]) -> list[StageChoice]:
    """Return the stages of a plan whose stages 1.. start at these atoms, each with the first recompute mode that fits.

    The stages have one replica each, or the same number.
    """
    edges, count = (0, *starts, problem.tables.num_atoms), problem.options.num_stages
    positions = [problem.tables.edges[atom] for atom in edges]
    choices = []
    fastest = problem.fastest_mode
    every = problem.sized.terms(positions[:-1], by_block=fastest == "block")
    with_units: list[StageTerms] = []
    for stage, terms in enumerate(every):
        in_flight, versions = problem.in_flight_and_versions(stage, count)
        waiting, limit, recompute = problem.waiting(stage), problem.limit(stage), fastest
        if terms.peak(in_flight, versions, fastest, waiting, problem.sharing) > limit:
            modes = problem.modes
            with_units = with_units or problem.sized.terms(positions[:-1], by_block="block" in modes)
            peaks = {
                mode: with_units[stage].peak(in_flight, versions, mode, waiting, problem.sharing) for mode in modes
            }
            recompute = next((mode for mode in modes if peaks[mode] <= limit), modes[-1])
        seconds = problem.stage_seconds(stage, count, recompute, (edges[stage], edges[stage + 1]))
        choices.append(
            StageChoice(
                positions[stage],
                positions[stage + 1],
                problem.ranks_of(stage),
                recompute,
                in_flight,
                versions,
                float(seconds),
                waiting,
            )
        )
    return choices


def predict(problem: Problem, choices: Sequence[StageChoice], terms: Sequence[StageTerms]) -> Prediction:
    """Return the closed-form prediction: the formula of a flush, or m times the slowest stage if steps overlap.

    The optimizer step of the slowest stage is added to both: in a flush nothing overlaps it, and without a flush a rank
    does not compute while it steps.
    """
    m, options = problem.num_microbatches, problem.options
    times = [choice.seconds / len(choice.ranks) for choice in choices]  # tau: each replica's share of the period
    per_rank = [0.0] * options.num_ranks
    for choice, share in zip(choices, times, strict=True):
        for rank in choice.ranks:
            per_rank[rank] += share
    step = problem.profile.optimizer_seconds_per_byte * max(
        of_stage.stepped / problem.cluster.update_speed_of(choice.ranks) / _sharing(problem, choice)
        for choice, of_stage in zip(choices, terms, strict=True)
    )
    if not problem.kind.synchronous:
        pipeline = m * max(per_rank)
    elif options.stages_per_rank > 1 or options.replicas > 1:
        # the pipeline fills and drains with one of the rank's v stages at a time: bubble (p - 1)/v (arXiv:2104.04473)
        pipeline = options.replicas * (problem.share * max(per_rank) + (options.num_groups - 1) * max(times))
    else:
        pipeline = (m - 1) * max(times) + math.fsum(times)
    total = pipeline + step
    busy = m * math.fsum(per_rank)
    bubble = max(0.0, 1 - busy / (total * options.num_ranks)) if total else 0.0
    return Prediction(total, options.batch_size / total if total else 0.0, bubble, max(times))


def _sharing(problem: Problem, choice: StageChoice) -> int:
    """Return the number of replicas that divide the optimizer state of a stage."""
    return len(choice.ranks) if problem.options.sharded else 1


def build_plan(problem: Problem, choices: Sequence[StageChoice]) -> Plan:
    """Return the plan with these stages.

    Raises: PlanError if a parameter is in no stage.
    """
    graph, cuts, m = problem.profile.graph, problem.cuts, problem.num_microbatches
    positions = [choice.start for choice in choices[1:]]
    edges = (*(choice.start for choice in choices), len(graph.nodes))
    state = state_of_stages(graph, cuts, positions)
    sizes = graph.sizes(problem.microbatch_size)
    boundaries = tuple(
        Boundary(value, producer, consumers, cuts.spec(value), cuts.spec(value).num_bytes(sizes))
        for value, producer, consumers in cuts.boundaries(positions)
    )
    exchanged = sum(boundary.bytes * len(boundary.consumers) for boundary in boundaries)
    by_block = any(choice.recompute == "block" for choice in choices)
    terms = problem.sized.terms(edges[:-1], by_block=by_block)
    stages = tuple(_stage(problem, index, choice, state[index], terms[index]) for index, choice in enumerate(choices))
    check_every_parameter(graph, stages)
    num_used = 1 + max(rank for stage in stages for rank in stage.ranks)
    options = dict(problem.options.schedule_options)
    if problem.options.stages_per_rank > 1:
        options["stages_per_rank"] = problem.options.stages_per_rank
    return Plan(
        graph_digest=graph.digest,
        workload=problem.profile.workload,
        team=problem.profile.workload.team,
        num_ranks=num_used,
        stages=stages,
        boundaries=boundaries,
        ties=find_ties(
            graph, [names for names, _ in state], exchanged, problem.microbatch_size, problem.options.exact_ties
        ),
        schedule=problem.kind.name,
        schedule_options=options,
        schedule_text=problem.options.schedule_text,
        batch_size=problem.options.batch_size,
        num_microbatches=m,
        microbatch_size=problem.microbatch_size,
        predicted=predict(problem, choices, terms),
        shard_optimizer=problem.options.sharded and any(stage.replicas > 1 for stage in stages),
        notes=(
            *_notes(problem, edges, num_used),
            *_notes_of_checkpoints(problem, stages),
            *_notes_of_shards(problem, choices, terms),
        ),
    )


def _stage(problem: Problem, index: int, choice: StageChoice, state: State, terms: StageTerms) -> Stage:
    graph, costs, work = problem.profile.graph, problem.measurement.costs, problem.measurement.work
    last = choice.stop == len(graph.nodes)
    nodes = problem.cuts.stage_nodes(choice.start, choice.stop, graph.outputs if last else ())
    speed = problem.cluster.speed_of(choice.ranks)
    forward = math.fsum(costs[node.name].forward_seconds for node in nodes)
    units = _units(problem, choice) if choice.recompute == "block" else ()
    inside = {node.name for start, stop in units for node in graph.nodes[start:stop] if not node.input_only}
    again = math.fsum(costs[name].forward_seconds for name in inside)
    # of a stage with one unit at most, there may be nothing to run again
    recompute = "never" if choice.recompute == "block" and not units else choice.recompute
    return Stage(
        index=index,
        start=choice.start,
        stop=choice.stop,
        first=graph.nodes[choice.start].name,
        last=graph.nodes[choice.stop - 1].name,
        ranks=choice.ranks,
        parameters=state[0],
        forward_seconds=forward / speed,
        backward_seconds=math.fsum(costs[node.name].backward_seconds for node in nodes) / speed,
        peak_bytes=terms.peak(
            choice.in_flight, choice.versions, choice.recompute, choice.waiting, _sharing(problem, choice)
        ),
        recompute=recompute,
        units=units,
        recompute_seconds=(forward if recompute == "stage" else again) / speed,
        buffers=state[1],
        modules=stage_modules(graph, choice.start, choice.stop),
        flops=sum(work[node.name].model_flops for node in graph.nodes[choice.start : choice.stop] if node.name in work),
    )


def _units(problem: Problem, choice: StageChoice) -> tuple[tuple[int, int], ...]:
    """Return the units of a stage as node positions."""
    edges = problem.tables.edges
    start, stop = edges.index(choice.start), edges.index(choice.stop)
    spans = problem.atoms.units.within(start, stop, keep_last=choice.in_flight == 1)
    return tuple((edges[first], edges[behind]) for first, behind in spans)


def _notes_of_checkpoints(problem: Problem, stages: Sequence[Stage]) -> tuple[str, ...]:
    """Return notes on the user's calls of checkpoint() that a stage does not recompute as units."""
    graph = problem.profile.graph
    calls = {node.checkpoint for node in graph.nodes} - {0}
    if not calls or problem.options.recompute == "never":
        return ()
    if problem.kind.splits_backward and any(stage.recompute == "never" for stage in stages):
        return (
            f"{problem.kind.name} keeps the activations of the model's checkpoint() calls, because it splits the "
            "backward; other schedules recompute them",
        )
    missing = len(calls) - len(problem.atoms.units.spans)
    if not missing:
        return ()
    return (
        f"{missing} of {len(calls)} checkpoint() calls of the model are not recomputed as units: no legal cut is at "
        "their ends, or a tensor of the batch that they read changes in place",
    )


def _notes_of_shards(problem: Problem, choices: Sequence[StageChoice], terms: Sequence[StageTerms]) -> tuple[str, ...]:
    """Return a note on the optimizer state that replicas divide."""
    freed = max(t.optimizer - t.optimizer_on(_sharing(problem, c)) for c, t in zip(choices, terms, strict=True))
    if not freed:
        return ()
    return (
        f"the replicas of a stage divide its optimizer state, which takes up to {in_short_bytes(freed)} less on a rank",
    )


def _notes(problem: Problem, edges: Sequence[int], num_used: int) -> tuple[str, ...]:
    graph, given = problem.profile.graph, max(problem.options.num_ranks, problem.options.offered)
    notes = []
    if num_used < given:
        notes.append(f"{given - num_used} of {given} ranks stay unused: they would not make a step faster")
    for name, home in unused_state(graph).items():
        stage = next(s for s in range(len(edges) - 1) if edges[s] <= home < edges[s + 1])
        kind = "parameter" if name in graph.parameters else "buffer"
        notes.append(f"{kind} {name} is read by nothing; stage {stage} keeps it")
    for note in notes:
        log.info(note)
    return tuple(notes)

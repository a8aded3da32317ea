"""Maps the stages of a plan to another recording of the same model: another batch shape, or evaluation mode.

The parameters of each rank, and its connections, are those of the plan. So a stage of the other graph may use only what
the plan's stage has, and may send values only to stages to which the plan's stage sends some. If the two graphs have
the same calls, the cuts are the same, and so are the units of recompute by block. Otherwise each cut is a legal one
near the call at which the plan cuts; the sum of the distances is minimal. If values would skip a stage, only one value
crosses each cut.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopipe.errors import PlanError
from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph, Node
from autopipe.ir.messages import chains
from autopipe.ir.module_names import stage_modules
from autopipe.ir.plan import Boundary, Plan, Stage
from autopipe.planning.cost.atoms import may_run_twice

_REMEDY = "pad the batches to one shape, or plan with fewer stages"
_NEAREST = 48  # legal cuts that are tried for each cut of the plan


def map_cuts_to(plan: Plan, graph: Graph, other: Graph, *, all_connected: bool = False) -> Plan:
    """Return the plan for ``other``. ``graph``: the graph of the plan.

    ``all_connected``: every rank may send to every later one, also where the plan has no boundary.

    Raises: PlanError if with any cuts some stage needs more than it has.
    """
    cuts = Cuts(other)
    chosen = [stage.start for stage in plan.stages[1:]]
    if _calls(graph) != _calls(other) or not set(chosen) <= set(cuts.legal):
        nearest = functools.partial(_nearest, _available(plan, graph), graph, other, cuts, chosen)
        chosen = nearest(cuts.legal)
        if not all_connected and not _pairs(cuts.boundaries(chosen)) <= _forward(plan):
            with contextlib.suppress(PlanError):
                chosen = nearest([position for position in cuts.legal if len(cuts.boundaries([position])) <= 1])
    edges = [0, *chosen, len(other.nodes)]
    stages = tuple(
        _moved(stage, other, start, stop, _units(stage, graph, other, cuts, start, stop))
        for stage, (start, stop) in zip(plan.stages, itertools.pairwise(edges), strict=True)
    )
    sizes = {symbol.name: symbol.hint for symbol in other.symbols}
    boundaries = tuple(
        Boundary(value, producer, consumers, cuts.spec(value), cuts.spec(value).num_bytes(sizes))
        for value, producer, consumers in cuts.boundaries(chosen)
    )
    moved = replace(plan, graph_digest=other.digest, stages=stages, boundaries=boundaries)
    if not all_connected:
        _check_edges(plan, graph, moved, other)
    for stage, available in zip(stages, _available(plan, graph), strict=True):
        nodes = cuts.stage_nodes(stage.start, stage.stop, other.outputs if stage is stages[-1] else ())
        lacking = next((name for node in nodes for name in _state(node) if name not in available), "")
        if lacking:
            raise PlanError(
                f"in its new recording, the model reads {lacking} in {stage.label}, which does not have it",
                remedy=_REMEDY,
            )
    return moved


def homes(graph: Graph, other: Graph) -> dict[str, str]:
    """Return the nodes of ``graph`` whose stages should keep the state that only ``other`` reads, by name of the state.

    It is the node of ``graph`` next to the one where ``other`` reads it first, so that the cuts need not move.
    """
    read = {name for node in graph.nodes for name in _state(node)}
    first: dict[str, int] = {}
    for index, node in enumerate(other.nodes):
        for name in _state(node):
            if name not in read:
                first.setdefault(name, index)
    places = _places(other, graph, list(first.values()))
    last = len(graph.nodes) - 1
    return {name: graph.nodes[min(place, last)].name for name, place in zip(first, places, strict=True)}


def _calls(graph: Graph) -> list[tuple[object, ...]]:
    """Return the calls of a graph and their state, without sizes, for comparison."""
    return [
        (n.kind, n.target, n.inputs, n.after, n.parameters, n.buffers, n.mutates, n.input_only) for n in graph.nodes
    ]


def _moved(stage: Stage, other: Graph, start: int, stop: int, units: tuple[tuple[int, int], ...]) -> Stage:
    first, last = other.nodes[start].name, other.nodes[stop - 1].name
    # a stage without any unit keeps its activations
    recompute = "never" if stage.recompute == "block" and not units else stage.recompute
    stage = replace(stage, recompute=recompute, units=()) if not units else stage
    modules = stage_modules(other, start, stop)
    return replace(stage, start=start, stop=stop, first=first, last=last, modules=modules, units=units)


def _units(stage: Stage, graph: Graph, other: Graph, cuts: Cuts, start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """Return the units of a stage in the other graph: the whole atoms between the same calls."""
    if not stage.units:
        return ()
    places = _places(graph, other, [position for unit in stage.units for position in unit])
    legal = [start, *(position for position in cuts.legal if start < position < stop), stop]
    units = []
    for first, behind in zip(places[::2], places[1::2], strict=True):
        inside = [position for position in legal if first <= position <= behind]
        if len(inside) > 1 and may_run_twice(cuts, inside[0], inside[-1]):
            units.append((inside[0], inside[-1]))
    return tuple(units)


def _available(plan: Plan, graph: Graph) -> list[set[str]]:
    """Return the parameters and buffers that each stage has."""
    cuts, available = Cuts(graph), []
    for stage in plan.stages:
        nodes = cuts.stage_nodes(stage.start, stage.stop, graph.outputs if stage is plan.stages[-1] else ())
        available.append({*stage.parameters, *stage.buffers, *(name for node in nodes for name in _state(node))})
    return available


def _state(node: Node) -> tuple[str, ...]:
    return (*node.parameters, *node.buffers, *node.buffers_written)


def _nearest(
    available: Sequence[set[str]],
    graph: Graph,
    other: Graph,
    cuts: Cuts,
    starts: Sequence[int],
    legal: Sequence[int],
) -> list[int]:
    """Return the legal cuts nearest to the plan's with which no stage needs state that it does not have."""
    foreign = [_foreign(of_stage, other) for of_stage in available]
    # best[position]: (sum of distances, cuts) of the stages before a cut at ``position``
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for index, place in enumerate(_places(graph, other, starts)):
        positions = sorted(legal, key=functools.partial(_distance, place))[:_NEAREST]
        extended: dict[int, tuple[int, list[int]]] = {}
        for position in positions:
            ways = [
                (distance + abs(position - place), [*before, position])
                for start, (distance, before) in best.items()
                if start < position and foreign[index][position] == foreign[index][start]
            ]
            if ways:
                extended[position] = min(ways)
        best = extended
    last = foreign[-1]
    ends = [way for start, way in best.items() if start < len(other.nodes) and last[-1] == last[start]]
    if not ends:
        raise PlanError(
            f"the new recording of {other.name} cannot be cut so that every stage needs only what it has",
            remedy=_REMEDY,
        )
    return min(ends)[1]


def _foreign(available: set[str], other: Graph) -> list[int]:
    """Return, for every position, the number of calls before it that need state which a stage does not have."""
    counts = [0]
    for node in other.nodes:
        counts.append(counts[-1] + (not node.input_only and not available.issuperset(_state(node))))
    return counts


def _distance(place: int, position: int) -> int:
    return abs(position - place)


def _places(graph: Graph, other: Graph, starts: Sequence[int]) -> list[int]:
    """Return where the plan's cuts are in the other graph: before the call that matches the first of the stage."""
    ours, theirs = [_key(node) for node in graph.nodes], [_key(node) for node in other.nodes]
    matches: dict[int, int] = {}
    for block in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks():
        matches.update((block.a + i, block.b + i) for i in range(block.size))
    return [next((matches[i] for i in range(start, len(ours)) if i in matches), len(theirs)) for start in starts]


def _key(node: Node) -> tuple[str, ...]:
    return node.kind, node.target, node.module_path, node.source


def _check_edges(plan: Plan, graph: Graph, moved: Plan, other: Graph) -> None:
    """Refuse values between stages that the plan does not connect, and gradients where the plan returns none.

    Raises: PlanError.
    """
    for ours, theirs in (
        (_forward(plan), _forward(moved)),
        (_backward(plan, graph), _backward(moved, other)),
    ):
        if not theirs <= ours:
            raise PlanError(
                "in its new recording, the model sends values between stages that the plan does not connect",
                remedy=_REMEDY,
            )


def _forward(plan: Plan) -> set[tuple[int, int]]:
    return _pairs((boundary.value, boundary.producer, boundary.consumers) for boundary in plan.boundaries)


def _pairs(boundaries: Iterable[tuple[str, int, Sequence[int]]]) -> set[tuple[int, int]]:
    return {(producer, consumer) for _, producer, consumers in boundaries for consumer in consumers}


def _backward(plan: Plan, graph: Graph) -> set[tuple[int, int]]:
    return {pair for chain in chains(graph, plan).values() for pair in itertools.pairwise(chain)}

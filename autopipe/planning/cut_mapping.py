"""The same stages for another recording of the same model: of another shape of the batch, or in evaluation mode.

The ranks hold what the plan gave them and are connected as the plan says. So a stage of the other graph may use what
the plan's stage uses, and nothing else; and values may go only where the plan has values going. Where the two graphs
are the same calls, the cuts are the same; else each cut is the legal one nearest to where the plan's calls are found
again, and the distances together are least.
"""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

from autopipe.errors import PlanError
from autopipe.ir.cuts import Cuts
from autopipe.ir.gradients import chains
from autopipe.ir.graph import Graph, Node
from autopipe.ir.module_names import stage_modules
from autopipe.ir.plan import Boundary, Plan, Stage

_REMEDY = "pad the batches to one shape, or plan with fewer stages"
_NEAREST = 48  # legal cuts that are tried for each of the plan's


def map_cuts_to(plan: Plan, graph: Graph, other: Graph) -> Plan:
    """Return the plan's stages cut out of ``other``. ``graph``: what the plan was made for.

    Raises: PlanError where no cuts give every stage no more than it has.
    """
    cuts = Cuts(other)
    chosen = [stage.start for stage in plan.stages[1:]]
    if _calls(graph) != _calls(other) or not set(chosen) <= set(cuts.legal):
        chosen = _nearest(_available(plan, graph), graph, other, cuts, chosen)
    edges = [0, *chosen, len(other.nodes)]
    stages = tuple(
        _moved(stage, other, start, stop)
        for stage, (start, stop) in zip(plan.stages, itertools.pairwise(edges), strict=True)
    )
    sizes = {symbol.name: symbol.hint for symbol in other.symbols}
    boundaries = tuple(
        Boundary(value, producer, consumers, cuts.spec(value), cuts.spec(value).num_bytes(sizes))
        for value, producer, consumers in cuts.boundaries(chosen)
    )
    moved = replace(plan, graph_digest=other.digest, stages=stages, boundaries=boundaries)
    _check_edges(plan, graph, moved, other)
    for stage, available in zip(stages, _available(plan, graph), strict=True):
        nodes = cuts.stage_nodes(stage.start, stage.stop, other.outputs if stage is stages[-1] else ())
        lacking = next((name for node in nodes for name in _state(node) if name not in available), "")
        if lacking:
            raise PlanError(
                f"captured again, the model reads {lacking} where {stage.label} does not hold it",
                remedy=_REMEDY,
            )
    return moved


def homes(graph: Graph, other: Graph) -> dict[str, str]:
    """Return where the stages of ``graph`` should keep the state that ``other`` reads and ``graph`` does not.

    It is the node of ``graph`` that comes next where ``other`` reads it first: so the cuts can stay where they are.
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
    """Return what makes two graphs the same calls on the same state, whatever the sizes."""
    return [
        (n.kind, n.target, n.inputs, n.after, n.parameters, n.buffers, n.mutates, n.input_only) for n in graph.nodes
    ]


def _moved(stage: Stage, other: Graph, start: int, stop: int) -> Stage:
    first, last = other.nodes[start].name, other.nodes[stop - 1].name
    return replace(stage, start=start, stop=stop, first=first, last=last, modules=stage_modules(other, start, stop))


def _available(plan: Plan, graph: Graph) -> list[set[str]]:
    """Return the parameters and buffers that each stage has."""
    cuts, available = Cuts(graph), []
    for stage in plan.stages:
        nodes = cuts.stage_nodes(stage.start, stage.stop, graph.outputs if stage is plan.stages[-1] else ())
        available.append({*stage.parameters, *stage.buffers, *(name for node in nodes for name in _state(node))})
    return available


def _state(node: Node) -> tuple[str, ...]:
    return (*node.parameters, *node.buffers, *node.buffers_written)


def _nearest(available: Sequence[set[str]], graph: Graph, other: Graph, cuts: Cuts, starts: Sequence[int]) -> list[int]:
    """Return the legal cuts that are nearest to the plan's, of those that give no stage what it does not hold."""
    foreign = [_foreign(of_stage, other) for of_stage in available]
    # best[position] = (sum of distances, cuts so far) of the stages before a cut at ``position``
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for index, place in enumerate(_places(graph, other, starts)):
        positions = sorted(cuts.legal, key=functools.partial(_distance, place))[:_NEAREST]
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
            f"{other.name}, captured again, cannot be cut so that every stage needs only what it holds",
            remedy=_REMEDY,
        )
    return min(ends)[1]


def _foreign(available: set[str], other: Graph) -> list[int]:
    """Return, for every position, how many calls before it need state that a stage does not hold."""
    counts = [0]
    for node in other.nodes:
        counts.append(counts[-1] + (not node.input_only and not available.issuperset(_state(node))))
    return counts


def _distance(place: int, position: int) -> int:
    return abs(position - place)


def _places(graph: Graph, other: Graph, starts: Sequence[int]) -> list[int]:
    """Return where the plan's cuts lie in the other graph: before the call that it begins with, found again."""
    ours, theirs = [_key(node) for node in graph.nodes], [_key(node) for node in other.nodes]
    matches: dict[int, int] = {}
    for block in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks():
        matches.update((block.a + i, block.b + i) for i in range(block.size))
    return [next((matches[i] for i in range(start, len(ours)) if i in matches), len(theirs)) for start in starts]


def _key(node: Node) -> tuple[str, ...]:
    return node.kind, node.target, node.module_path, node.source


def _check_edges(plan: Plan, graph: Graph, moved: Plan, other: Graph) -> None:
    """Refuse values that would go between stages which are not connected, or bring back a gradient where none goes."""
    for ours, theirs in (
        (_forward(plan), _forward(moved)),
        (_backward(plan, graph), _backward(moved, other)),
    ):
        if not theirs <= ours:
            raise PlanError(
                "captured again, the model sends values between stages that the plan does not connect", remedy=_REMEDY
            )


def _forward(plan: Plan) -> set[tuple[int, int]]:
    return {(boundary.producer, consumer) for boundary in plan.boundaries for consumer in boundary.consumers}


def _backward(plan: Plan, graph: Graph) -> set[tuple[int, int]]:
    return {pair for chain in chains(graph, plan).values() for pair in itertools.pairwise(chain)}

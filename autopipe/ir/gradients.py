"""Through which stages a gradient comes back. Pure arithmetic over ``Graph``.

A stage that reads a value without differentiating it (detached, compared, counted) has no gradient to hand back, and
autograd makes none. So the chain in which a boundary's gradient travels leaves such a stage out.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.ir.graph import Graph, Node
from autopipe.ir.plan import Plan, Tie

# gradients of replicas are reduced in buckets of this size (PyTorch DDP, arXiv:2006.15704, section 3.2)
BUCKET_BYTES = 25 * 2**20


def num_buckets(num_bytes: float) -> int:
    """Return how many buckets so many bytes of gradients make, about."""
    return max(1, -(-int(num_bytes) // BUCKET_BYTES))


def _may_carry(node: Node) -> bool:
    """Tell whether a result may need a gradient. Of a tuple, or a call that changes memory, nothing better is known."""
    return node.spec is None or node.spec.requires_grad


def _reached(graph: Graph) -> list[bool]:
    """Return, for every call, whether backward from the loss may run through it."""
    needed, reached_sets = set(graph.outputs[:1]), []
    for node in reversed(graph.nodes):
        reached = _may_carry(node) and (node.name in needed or bool(node.mutates))
        if reached:
            needed.update(node.inputs)
        reached_sets.append(reached)
    return reached_sets[::-1]


def chains(graph: Graph, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return, for every boundary value whose gradient comes back, the stages that add to it: producer first.

    Values that no later stage differentiates are left out.
    """
    reached = _reached(graph)
    last = len(plan.stages) - 1
    chain_of = {}
    for boundary in plan.boundaries:
        if not boundary.spec.requires_grad:
            continue
        readers = [
            stage
            for stage in boundary.consumers
            if _reads(graph.nodes[plan.stages[stage].start : plan.stages[stage].stop], boundary.value, reached, graph)
            or (stage == last and boundary.value == graph.outputs[0])
        ]
        if readers:
            chain_of[boundary.value] = (boundary.producer, *readers)
    return chain_of


def trained_ties(graph: Graph, plan: Plan) -> tuple[Tie, ...]:
    """Return the ties whose stages exchange gradients.

    A frozen parameter has none. Where nothing changes it, its stages exchange nothing at all, and it has one value at
    every weight version. The plan lists it all the same: its digest names what was written.
    """
    return tuple(tie for tie in plan.ties if graph.parameters[tie.parameter].requires_grad)


def moving_ties(graph: Graph, plan: Plan) -> tuple[Tie, ...]:
    """Return the ties whose stages exchange values: of trained parameters, and of those that ``after_step`` changes."""
    return tuple(tie for tie in plan.ties if tie.parameter in graph.moving)


def _reads(nodes: Sequence[Node], value: str, reached: Sequence[bool], graph: Graph) -> bool:
    return any(value in node.inputs and reached[graph.position[node.name]] for node in nodes)

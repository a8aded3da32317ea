"""The stages through which the gradient of a boundary value returns. Pure arithmetic over ``Graph``.

A stage that reads a value without differentiating it (detached, compared, counted) has no gradient to return. So the
chain of stages along which a boundary's gradient travels does not include it.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.ir.graph import Graph, Node
from autopipe.ir.plan import Plan, Tie

# The gradients of replicas are reduced in buckets of this size (PyTorch DDP, arXiv:2006.15704, section 3.2).
BUCKET_BYTES = 25 * 2**20


def num_buckets(num_bytes: float) -> int:
    """Return about how many buckets ``num_bytes`` of gradients need."""
    return max(1, -(-int(num_bytes) // BUCKET_BYTES))


def _may_carry(node: Node) -> bool:
    """Return whether a result may need a gradient: True if unknown, as for a tuple or a call that changes memory."""
    return node.spec is None or node.spec.requires_grad


def _reached(graph: Graph) -> list[bool]:
    """Return, for every node, whether the backward from the loss may run through it."""
    needed, reached_backwards = set(graph.outputs[:1]), []
    for node in reversed(graph.nodes):
        reached = _may_carry(node) and (node.name in needed or bool(node.mutates))
        if reached:
            needed.update(node.inputs)
        reached_backwards.append(reached)
    return reached_backwards[::-1]


def chains(graph: Graph, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return, for every boundary value with a gradient, the stages that add to the gradient, producer first.

    Values that no later stage differentiates are not included.
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
    """Return the ties whose stages exchange gradients: those of trained parameters.

    A plan also lists the ties of frozen parameters, because its digest covers them. Their stages exchange no gradient,
    and no value unless ``after_step`` changes it (``moving_ties``).
    """
    return tuple(tie for tie in plan.ties if graph.parameters[tie.parameter].requires_grad)


def moving_ties(graph: Graph, plan: Plan) -> tuple[Tie, ...]:
    """Return the ties whose stages exchange values: trained parameters, and those that ``after_step`` changes."""
    return tuple(tie for tie in plan.ties if tie.parameter in graph.moving)


def _reads(nodes: Sequence[Node], value: str, reached: Sequence[bool], graph: Graph) -> bool:
    return any(value in node.inputs and reached[graph.position[node.name]] for node in nodes)

"""How often the stages use each parameter: autograd adds the gradient of each use in turn, latest first."""

from __future__ import annotations

from collections import Counter

from autopipe.generate.parts import divide
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan

# modules that use their weights at each time
_REPEATED = frozenset(("LSTM", "GRU", "RNN"))


def is_serial(graph: Graph, plan: Plan) -> bool:
    """Return whether the calls of one backward must wait for each other, so that gradients are added as python does.

    The gradients of a tied parameter travel from the last stage to the first, call by call. If a stage adds several
    uses of one call, or passes a sum on, those of the call before must be in the sum already.
    """
    ties = [tie for tie in plan.ties if graph.parameters[tie.parameter].requires_grad]
    if any(len(tie.copies) > 1 for tie in ties):
        return True
    for part in divide(graph, plan) if ties else ():
        uses: Counter[str] = Counter()
        for node in part.nodes:
            often = 2 if node.opaque or node.module_type in _REPEATED else 1
            uses.update({graph.aliases.get(name, name): often for name in node.parameters})
        if any(count > 1 and graph.parameters[name].requires_grad for name, count in uses.items()):
            return True
    return False

"""How often the stages use each parameter: autograd adds the gradient of each use in turn, latest first."""

from __future__ import annotations

from collections import Counter

from torch._library.custom_ops import OPDEFS

from autopipe.generate.parts import divide
from autopipe.ir.graph import Graph, Node
from autopipe.ir.plan import Plan

# torch's modules, and functions and methods, that use each parameter once in a call
_MODULES = frozenset(
    (
        *("Linear", "Embedding", "EmbeddingBag", "LayerNorm", "RMSNorm", "GroupNorm", "PReLU"),
        *(f"{name}{n}d" for n in (1, 2, 3) for name in ("Conv", "ConvTranspose", "BatchNorm", "InstanceNorm")),
    )
)
_FUNCTIONS = frozenset(
    (
        *("linear", "embedding", "layer_norm", "rms_norm", "group_norm", "batch_norm", "conv1d", "conv2d", "conv3d"),
        *("t", "transpose", "permute", "view", "reshape", "unsqueeze", "expand", "to", "contiguous"),
    )
)


def used_often(graph: Graph) -> str:
    """Return the name of a trained parameter that a call may use several times; "" if none is known to be."""
    uses: Counter[str] = Counter()
    for node in graph.nodes:
        uses.update({graph.aliases.get(name, name): 1 if _uses_once(node) else 2 for name in node.parameters})
    return next((name for name, count in uses.items() if count > 1 and graph.parameters[name].requires_grad), "")


def is_serial(graph: Graph, plan: Plan) -> bool:
    """Return whether the calls of one backward must wait for each other, so that gradients are added as python does.

    The gradients of a tied parameter travel from the last stage to the first, call by call. If a stage adds several
    uses of one call, or passes a sum on, those of the call before must be in the sum already.
    """
    if any(len(tie.copies) > 1 for tie in plan.ties):
        return True
    for part in divide(graph, plan) if plan.ties else ():
        uses: Counter[str] = Counter()
        for node in part.nodes:
            often = 1 if _uses_once(node) else 2
            uses.update({graph.aliases.get(name, name): often for name in node.parameters})
        if any(count > 1 and graph.parameters[name].requires_grad for name, count in uses.items()):
            return True
    return False


def _uses_once(node: Node) -> bool:
    """Return whether a call uses each of its parameters once; False if that is not known."""
    if node.kind == "call_module":
        return not node.opaque and node.module_type in _MODULES
    if node.target.startswith("torch.ops."):  # an operator of the user is one node of autograd
        namespace, _, name = node.target.removeprefix("torch.ops.").partition(".")
        return f"{namespace}::{name.removesuffix('.default')}" in OPDEFS
    return node.target.rpartition(".")[2] in _FUNCTIONS

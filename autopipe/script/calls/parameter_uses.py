"""How often the stages use each parameter: autograd adds the gradient of each use in turn, latest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from torch import fx
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
        *("t", "transpose", "permute", "view", "reshape", "unsqueeze", "expand"),  # not "to", which may do nothing
    )
)


def twice_in_a_call(module: fx.GraphModule) -> frozenset[str]:
    """Return the nodes that get one value twice, or call a module that has a parameter twice."""
    twice = set()
    for node in module.graph.nodes:
        arguments: list[Any] = []
        fx.node.map_arg((node.args, node.kwargs), arguments.append)
        if node.op == "call_module":
            called = module.get_submodule(str(node.target))
            arguments += [id(tensor) for _, tensor in called.named_parameters(remove_duplicate=False)]
        if len(set(arguments)) < len(arguments):
            twice.add(node.name)
    return frozenset(twice)


def used_often(graph: Graph, nodes: Sequence[Node], twice: Collection[str]) -> str:
    """Return the name of a trained parameter that these nodes of a call may use several times, or "".

    ``twice``: as ``twice_in_a_call`` gives it.
    """
    uses: Counter[str] = Counter()
    for node in nodes:
        for name in node.parameters:
            uses[graph.aliases.get(name, name)] += 1 if _uses_once(node) and node.name not in twice else 2
    return next((name for name, count in uses.items() if count > 1 and graph.parameters[name].requires_grad), "")


def is_serial(graph: Graph, plan: Plan, twice: Collection[str]) -> bool:
    """Return whether the calls of one backward must wait for each other, so that gradients are added as python does.

    The gradients of a tied parameter travel from the last stage to the first, call by call. If a stage adds several
    uses of one call, or passes a sum on, those of the call before must be in the sum already.
    """
    if any(len(tie.copies) > 1 for tie in plan.ties):
        return True
    return any(used_often(graph, part.nodes, twice) for part in divide(graph, plan)) if plan.ties else False


def _uses_once(node: Node) -> bool:
    """Return whether a call uses each of its parameters once; False if that is not known."""
    if node.kind == "call_module":
        return not node.opaque and node.module_type in _MODULES
    if node.target.startswith("torch.ops."):  # an operator of the user is one node of autograd
        namespace, _, name = node.target.removeprefix("torch.ops.").partition(".")
        return f"{namespace}::{name.removesuffix('.default')}" in OPDEFS
    return node.target.rpartition(".")[2] in _FUNCTIONS

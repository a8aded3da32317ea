"""Numbers that a forward reads from tensors independent of the batch: ``if (torch.as_tensor(std) == 0).any():``.

The forward creates such a tensor from constants of the code, so its value is the same for every batch and can answer
the read. A number that came from a size of the batch looks the same; therefore two recordings at two sizes must have
read the same values (``symbolic_sizes.SymbolicSizes``), and at a symbolic size such a tensor depends on an input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from autopipe.trace.graph.replay import context_of

_MOST_NODES = 64
_LARGEST = 65_536  # elements
NOT_FIXED = object()


class Fixed:
    """The values of reads that do not depend on the batch. ``seen``: the answers as text, for comparison."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def number(self, node: fx.Node) -> Any:
        """Return the value that Python reads from a node, or NOT_FIXED if it depends on inputs or state."""
        nodes = _ancestors(node)
        if nodes is None or not all(map(_is_fixed, nodes)):
            return NOT_FIXED
        values: dict[fx.Node, Any] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch._C._DisablePythonDispatcher())
            stack.enter_context(torch.no_grad())
            for entry in nodes:
                values[entry] = _run(entry, values)
            value = values[node]
            if isinstance(value, Tensor):
                value = value.item() if value.numel() == 1 else value.tolist()
        self.seen.append(f"{[(str(entry.target), str(entry.args), str(entry.kwargs)) for entry in nodes]}: {value}")
        return value


def _ancestors(node: fx.Node) -> list[fx.Node] | None:
    """Return a node preceded by its inputs, in the order of the graph, or None if there are too many."""
    needed, pending = {node}, [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in needed:
                needed.add(source)
                pending.append(source)
        if len(needed) > _MOST_NODES:
            return None
    return [entry for entry in node.graph.nodes if entry in needed]


def _is_fixed(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or node.meta.get("opaque") or node.meta.get("changed"):
        return False
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.numel() > _LARGEST:
        return False
    drawn = node.meta.get("random", (0, 0))[1]
    changed = any(node in user.meta.get("mutates", ()) for user in node.users)
    return not drawn and not changed and "empty" not in str(node.target)


def _run(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda entry: values[entry])
    with context_of(node.meta):
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

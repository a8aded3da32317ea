"""Replace a split along the batch and its concatenation by one call that works for every batch size.

Image and text models write ``torch.cat(list(images))``. This makes as many calls as the batch has samples, and so a
different graph for every batch size. ``images.flatten(0, 1)`` computes the same.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx


def join(graph: fx.Graph, batch: int) -> None:
    """Replace each ``cat`` and ``stack`` over all parts of a tensor that was split along the batch by one call."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (torch.cat, torch.concat, torch.concatenate, torch.stack):
            continue
        whole = _whole(node.args[0] if node.args else None, batch)
        if whole is None or node.kwargs.keys() - {"dim"} or _dimension(node) != 0:
            continue
        value: Any = whole.meta.get("val")
        with graph.inserting_before(node):
            if node.target is torch.stack:
                clone = graph.call_method("clone", (whole,))
            elif isinstance(value, Tensor) and value.dim() > 1:
                flat = graph.call_method("flatten", (whole, 0, 1))
                flat.meta = {**node.meta, "val": value.flatten(0, 1)}
                clone = graph.call_method("clone", (flat,))  # the result of cat does not share memory
            else:
                continue
        clone.meta = dict(node.meta)
        for other in graph.nodes:
            if "mutates" in other.meta:
                other.meta["mutates"] = [clone if entry is node else entry for entry in other.meta["mutates"]]
        node.replace_all_uses_with(clone)
        graph.erase_node(node)


def _whole(parts: Any, batch: int) -> fx.Node | None:
    """Return the tensor whose ``batch`` parts along dimension 0 these are, all and in order, or None."""
    if not isinstance(parts, (list, tuple)) or len(parts) != batch:
        return None
    producer = None
    for index, part in enumerate(parts):
        if not isinstance(part, fx.Node) or part.target is not operator.getitem or part.args[1] != index:
            return None
        holder = part.args[0]
        if not isinstance(holder, fx.Node) or producer not in (None, holder):
            return None
        producer = holder
    if producer is None or producer.target not in ("unbind", torch.unbind) or _dimension(producer) != 0:
        return None
    whole = producer.args[0]
    return whole if isinstance(whole, fx.Node) else None


def _dimension(node: fx.Node) -> Any:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)

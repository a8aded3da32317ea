"""Compare a recording in evaluation mode with the graph: which arguments of the calls differ."""

from __future__ import annotations

from typing import Any

from torch import fx

from autopipe.trace.lines.of_nodes import short_where_text
from autopipe.trace.sizes.align import GraphsDiffer, merged

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def evaluation_arguments(
    same: dict[fx.Node, fx.Node], raw: dict[fx.Node, Arguments]
) -> tuple[dict[fx.Node, Arguments], str]:
    """Return node -> its arguments in evaluation mode where they differ, and why the graph cannot serve, or "".

    ``same``: node of the evaluation recording -> node of the training recording. ``raw``: the arguments of the latter
    as recorded, before sizes were written into the graph.
    """
    differing: dict[fx.Node, Arguments] = {}
    try:
        for other, node in same.items():
            if node.op in ("output", "placeholder", "get_attr"):
                continue
            differs: list[Any] = []

            def choose(_: Any, now: Any, differs: list[Any] = differs, node: fx.Node = node) -> Any:
                if type(now) is int:
                    raise GraphsDiffer("another size", short_where_text(node.meta))
                differs.append(now)
                return now

            args, kwargs = raw[node]
            args = merged(args, other.args, node.args, same, choose)
            kwargs = merged(kwargs, dict(other.kwargs), dict(node.kwargs), same, choose)
            if differs:
                differing[node] = args, kwargs
    except GraphsDiffer as difference:
        return {}, f"eval mode traces differently: {difference}"
    return differing, ""

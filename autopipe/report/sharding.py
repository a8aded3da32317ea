"""What a team of processes could shard of a model: a line for the terminal, and fields for ``--json``."""

from __future__ import annotations

import re
from typing import Any

from autopipe.ir.graph import Graph
from autopipe.ir.teams.axes import Axis, share
from autopipe.ir.teams.axis_sets import Coverage, coverage

TEAM = 2
_AXES, _REASONS = 4, 3  # shown


def line(graph: Graph, team: int = 1) -> str:
    """Return how much of the parameters can be sharded, along which axes, and why the rest is whole.

    ``team``: of how many members the graph is that of one.
    """
    if team > 1:
        return f"tensor parallelism: these are the figures of one of {team} members, which share out the model"
    shard = coverage(graph, TEAM)
    why = _listed([f"{_percent(share)} {reason}" for reason, share in shard.whole.items()], _REASONS, "; ")
    if not shard.axes:
        reason = f" ({why})" if why else ""
        return f"tensor parallelism: no parameter can be sharded over {TEAM} processes{reason}"
    alike: dict[str, list[str]] = {}
    for axis in shard.axes:
        padded = f" (padded to {axis.size + _padding(axis)})" if _padding(axis) else ""
        name = re.sub(r"\b\d+(?=\.)|(?<=\.)\d+(?=/)|#\d+$", "*", axis.name)
        alike.setdefault(name + padded, []).append(axis.name + padded)
    names = [f"{name} x {len(each)}" if len(each) > 1 else each[0] for name, each in alike.items()]
    axes = _listed(names, _AXES, ", ")
    return (
        f"tensor parallelism: {_percent(shard.share)} of the parameters can be sharded over {TEAM} processes, along "
        f"{_num_axes(len(shard.axes))}: {axes}" + (f"\n  whole: {why}" if why else "")
    )


def document(graph: Graph) -> dict[str, Any]:
    """Return the same in full."""
    shard: Coverage = coverage(graph, TEAM)
    return {
        "team": TEAM,
        "share": shard.share,
        "axes": [
            {
                "name": axis.name,
                "size": axis.size,
                "padding": _padding(axis),
                "parameters": [place.name for place in axis.parameters],
            }
            for axis in shard.axes
        ],
        "whole": shard.whole,
    }


def _padding(axis: Axis) -> int:
    """Return how much the members have beyond the axis, together."""
    return share(axis.size, TEAM) * TEAM - axis.size


def _num_axes(count: int) -> str:
    return "1 axis" if count == 1 else f"{count} axes"


def _listed(entries: list[str], most: int, between: str) -> str:
    rest = len(entries) - most
    return between.join(entries[:most]) + (f"{between}and {rest} more" if rest > 0 else "")


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "less than 0.1%"

"""What ``profile`` says of a model: the table of an estimate, and what a team of processes could shard."""

from __future__ import annotations

import re
from typing import Any

from rich import box
from rich.table import Table

from autopipe.ir.graph import Graph
from autopipe.ir.profile import PassWork, Profile
from autopipe.ir.teams.axes import Axis, share
from autopipe.ir.teams.axis_sets import Coverage, coverage
from autopipe.units import in_bytes, in_flops

TEAM = 2
_AXES, _REASONS = 4, 3  # shown


def sharding_line(graph: Graph, team: int = 1) -> str:
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


def sharding_fields(graph: Graph) -> dict[str, Any]:
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


def estimate(profile: Profile) -> tuple[Any, ...]:
    """Return one row per microbatch size, with operations, memory traffic and memory, and a line on the parameters."""
    table = Table(
        title=f"{profile.graph.name}, counted: nothing was timed",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
    )
    for name in ("microbatch", "forward", "backward", "memory traffic", "kept for backward", "workspace"):
        table.add_column(name, justify="right")
    for measurement in profile.measurements:
        costs, work = measurement.costs.values(), measurement.work.values()
        table.add_row(
            str(measurement.microbatch_size),
            in_flops(sum(entry.forward.flops for entry in work)),
            in_flops(sum(entry.backward.flops for entry in work)),
            in_bytes(sum(_moved(entry.forward) + _moved(entry.backward) for entry in work)),
            in_bytes(sum(cost.saved_bytes for cost in costs)),
            in_bytes(max((cost.workspace_bytes for cost in costs), default=0)),
        )
    state = profile.optimizer_bytes_per_byte * profile.trained_bytes
    every = profile.graph.parameter_bytes
    return table, f"{in_bytes(every)} of parameters; the optimizer keeps {in_bytes(state)}"


def _moved(work: PassWork) -> int:
    return work.matrix_bytes + work.other_bytes

"""``Graph`` and ``Plan`` -> the tree of modules as segments in the order of execution, cut into stages."""

from __future__ import annotations

import itertools
from typing import Any

from autopipe.ir.graph import Graph, Node
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile

MOST_SEGMENTS = 8000
_DEEPEST = 12


def module_tree(graph: Graph, plan: Plan, profile: Profile | None) -> dict[str, Any]:
    """Return columns of segments: a module, at a depth, between two positions, in one stage.

    Positions count nodes. ``weights`` has the width of each node: its forward and backward in nanoseconds where a
    profile has been measured, else 1. The deepest modules are omitted if there are too many segments.
    """
    paths = [_path(node) for node in graph.nodes]
    stage_of = [0] * len(paths)
    for stage in plan.stages:
        stage_of[stage.start : stage.stop] = [stage.index] * (stage.stop - stage.start)
    names: dict[str, int] = {}
    levels: list[list[tuple[int, int, int, int]]] = []
    for depth in range(1, min(max((len(path) for path in paths), default=0), _DEEPEST) + 1):
        level = []
        keys = [
            (path[:depth] if len(path) >= depth else (), stage) for path, stage in zip(paths, stage_of, strict=True)
        ]
        position = 0
        for (path, stage_index), group in itertools.groupby(keys):
            length = len(list(group))
            if path:
                name = names.setdefault(".".join(path), len(names))
                level.append((position, position + length, name, stage_index))
            position += length
        levels.append(level)
    kept, total = 0, 0
    for level in levels:
        total += len(level)
        if total > MOST_SEGMENTS and kept:
            break
        kept += 1
    segments = [(depth, *segment) for depth, level in enumerate(levels[:kept]) for segment in level]
    kinds = _kinds(graph)
    weights, by_time = _weights(graph, plan, profile)
    return {
        "names": list(names),
        "kinds": [kinds.get(name, "") for name in names],
        "depth": [segment[0] for segment in segments],
        "start": [segment[1] for segment in segments],
        "stop": [segment[2] for segment in segments],
        "name": [segment[3] for segment in segments],
        "stage": [segment[4] for segment in segments],
        "weights": weights,
        "byTime": by_time,
        "omitted": len(levels) - kept,
    }


def _path(node: Node) -> tuple[str, ...]:
    """Return the modules around a call, outermost first; the called module itself is the last one."""
    path = node.target if node.kind == "call_module" else node.module_path
    return tuple(path.split(".")) if path else ()


def _kinds(graph: Graph) -> dict[str, str]:
    """Return the class of each called module, and of each module whose forward makes a call."""
    kinds: dict[str, str] = {}
    for node in graph.nodes:
        path = node.target if node.kind == "call_module" else node.module_path
        if node.module_type:
            kinds.setdefault(path, node.module_type)
    return kinds


def _weights(graph: Graph, plan: Plan, profile: Profile | None) -> tuple[list[int], bool]:
    measured = [m for m in profile.measurements if m.costs] if profile is not None else []
    if not measured:
        return [1] * len(graph.nodes), False
    nearest = min(measured, key=lambda m: abs(m.microbatch_size - plan.microbatch_size))
    costs = [nearest.costs.get(node.name) for node in graph.nodes]
    weights = [0 if c is None else round((c.forward_seconds + c.backward_seconds) * 1e9) for c in costs]
    return (weights, True) if any(weights) else ([1] * len(graph.nodes), False)

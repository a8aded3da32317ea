"""Divide a graph into the segments that are timed.

Segments begin and end at legal cuts (a stage can never end between two of them) and at the borders of the model's
blocks, so that equal blocks give equal segments and are timed once::

    nodes       embed | blocks.0 ............ | blocks.1 ............ | norm head loss
    segments    embed |     a     |     b     |     a     |     b     |       c

A long block is divided evenly; nodes that take less than ``least_seconds`` are joined with the ones after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph


def block_of(module_path: str) -> str:
    """Return the outermost numbered module of a path: ``model.layers.3`` of ``model.layers.3.mlp.up``; "" if none."""
    parts = module_path.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ""


def segments(graph: Graph, seconds: Sequence[float], least_seconds: float) -> list[tuple[int, int]]:
    """Divide the nodes into segments, returned as (start, stop). ``seconds``: rough forward time of every node."""
    count = len(graph.nodes)
    if not count:
        return []
    atoms = list(pairwise([0, *Cuts(graph).legal, count]))

    def block(atom: tuple[int, int]) -> str:
        work = [node for node in graph.nodes[atom[0] : atom[1]] if not node.input_only]
        return block_of(work[0].module_path) if work else ""

    def length(run: Sequence[tuple[int, int]]) -> float:
        return sum(seconds[run[0][0] : run[-1][1]]) if run else 0.0

    runs: list[list[tuple[int, int]]] = []
    short: list[tuple[int, int]] = []
    for _, group in groupby(atoms, key=block):
        run = list(group)
        if length(run) < least_seconds:
            short += run
            if length(short) >= least_seconds:
                runs.append(short)
                short = []
            continue
        if short:
            runs.append(short)
            short = []
        runs += _divided(run, [length([atom]) for atom in run], least_seconds)
    if short:
        runs.append(short)
    return [(run[0][0], run[-1][1]) for run in runs]


def _divided(run: list[tuple[int, int]], seconds: Sequence[float], least_seconds: float) -> list[list[tuple[int, int]]]:
    """Divide atoms evenly into parts of at least about ``least_seconds``."""
    total = sum(seconds)
    count = max(int(total / least_seconds), 1)
    parts: list[list[tuple[int, int]]] = [[]]
    passed = 0.0
    for atom, cost in zip(run, seconds, strict=True):
        if parts[-1] and passed + cost / 2 >= total * len(parts) / count:
            parts.append([])
        parts[-1].append(atom)
        passed += cost
    return parts

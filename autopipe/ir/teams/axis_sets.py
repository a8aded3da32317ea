"""The axes that a team shards: a set of ``Axis`` without conflicts that covers most of the parameters."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopipe.ir.graph import Graph
from autopipe.ir.teams.axes import BY_INDEX, Axis, Segment, share

_EXACT = 12  # so many axes that exclude each other are chosen by trying all sets
_LEAST = 0.001  # of the bytes of the largest axis: a smaller one costs more in sums over the team than it saves


def num_bytes(graph: Graph, parameters: Iterable[str]) -> int:
    """Return the bytes of some of the graph's parameters."""
    return sum(graph.parameters[name].num_bytes({}) for name in parameters)


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a team shards of a model."""

    team: int
    axes: tuple[Axis, ...]  # that were chosen
    share: float  # of the bytes of the parameters that are sharded, 0 .. 1
    whole: dict[str, float]  # why parameters are whole -> the share of their bytes, the largest first


def coverage(graph: Graph, team: int) -> Coverage:
    """Return what a team of ``team`` members shards of a graph whose axes were found."""
    axes = choose(graph, graph.axes, team)
    total = max(num_bytes(graph, graph.parameters), 1)
    names = {place.name for axis in axes for place in axis.parameters}
    reasons, whole = dict(graph.whole), Counter[str]()
    for name in graph.parameters:
        if name not in names:
            whole[reasons.get(name) or _why_not_chosen(graph, name, team)] += num_bytes(graph, [name])
    shares = {why: count / total for why, count in whole.most_common()}
    return Coverage(team, axes, num_bytes(graph, names) / total, shares)


def _why_not_chosen(graph: Graph, name: str, team: int) -> str:
    axes = [axis for axis in graph.axes if any(place.name == name for place in axis.parameters)]
    if not any(divides(graph, axis, team) for axis in axes):
        sizes = sorted({axis.size for axis in axes})
        return f"a size of {', '.join(map(str, sizes))}, which {team} does not divide"
    return "few bytes, or another axis of the same calls"


def divides(graph: Graph, axis: Axis, team: int) -> bool:
    """Return whether a team can shard an axis: evenly, or with padding, and each member has some of it.

    Padding must take part in nothing. So all sums of the axis are those of a vocabulary, which know its size; every
    tensor that carries it has it as a complete dimension; and no random numbers are drawn for it.
    """
    if axis.size % team == 0:
        return axis.size >= team
    if share(axis.size, team) * (team - 1) >= axis.size or axis.draws:
        return False
    if any(entry.how not in BY_INDEX for entry in axis.sums) or any(not rewrite.whole for rewrite in axis.rewrites):
        return False
    specs = {**graph.parameters, **graph.buffers, **{node.name: node.spec for node in graph.nodes}}
    for place in (*axis.parameters, *axis.state, *axis.values):
        spec = specs.get(place.name)
        if spec is None or spec.shape[place.dimension] != axis.size or place.segments != (Segment(0, 1),):
            return False
    return True


def choose(graph: Graph, axes: Sequence[Axis], team: int) -> tuple[Axis, ...]:
    """Return the axes that a team shards: a set without conflicts that covers most bytes of the parameters.

    Among sets of equal bytes, the one with fewer sums over the team is chosen. Axes of few bytes are left out, and so
    is an axis with a parameter whose gradient would be summed for some of its uses only. ``team``: number of members.
    """
    of_axis = {axis.name: num_bytes(graph, (place.name for place in axis.parameters)) for axis in axes}
    least = _LEAST * max(of_axis.values(), default=0)
    candidates = [axis for axis in axes if team > 1 and of_axis[axis.name] >= least and divides(graph, axis, team)]
    while True:
        chosen = [axis for group in _groups(candidates) for axis in _best(graph, group)]
        mixed = _mixed(graph, chosen)
        if not mixed:
            names = {axis.name for axis in chosen}
            return tuple(axis for axis in axes if axis.name in names)
        candidates = [axis for axis in candidates if axis.name not in mixed]


def _mixed(graph: Graph, chosen: Sequence[Axis]) -> set[str]:
    """Return the axes with a ``partial`` parameter that is also read by a node outside of the chosen axes."""
    taking_part = {name for axis in chosen for name in axis.nodes}
    outside = {name for node in graph.nodes if node.name not in taking_part for name in node.parameters}
    return {axis.name for axis in chosen if outside & {*axis.partial}}


def _groups(axes: Sequence[Axis]) -> list[list[Axis]]:
    """Return the axes in groups: two that exclude each other are in one group."""
    users: dict[str, list[int]] = {}
    for index, axis in enumerate(axes):
        for name in (*axis.nodes, *(place.name for place in (*axis.parameters, *axis.state))):
            users.setdefault(name, []).append(index)
    group = [*range(len(axes))]

    def root(index: int) -> int:
        while group[index] != index:
            index = group[index]
        return index

    for indices in users.values():
        for index in indices[1:]:
            group[root(index)] = root(indices[0])
    groups: dict[int, list[Axis]] = {}
    for index, axis in enumerate(axes):
        groups.setdefault(root(index), []).append(axis)
    return list(groups.values())


def _best(graph: Graph, group: Sequence[Axis]) -> list[Axis]:
    """Return the best set of a group: the exact one of a small group, else the largest axes first."""

    def worth(axis: Axis) -> tuple[int, int]:
        return num_bytes(graph, (place.name for place in axis.parameters)), -axis.num_collectives

    ranked = sorted(group, key=worth, reverse=True)
    worths = [worth(axis) for axis in ranked]
    excluded = [
        {j for j, other in enumerate(ranked) if j != i and axis.excludes(other)} for i, axis in enumerate(ranked)
    ]
    greedy: list[int] = []
    for index in range(len(ranked)):
        if not excluded[index] & {*greedy}:
            greedy.append(index)
    best = greedy
    if 1 < len(ranked) <= _EXACT:
        for count in range(1, len(ranked) + 1):
            for some in itertools.combinations(range(len(ranked)), count):
                if any(excluded[index] & {*some} for index in some):
                    continue
                best = max(
                    best,
                    [*some],
                    key=lambda indices: [sum(part) for part in zip(*(worths[i] for i in indices), strict=True)],
                )
    return [ranked[index] for index in best]

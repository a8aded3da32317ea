"""From the sizes of all values to ``Axis``: which leaves can be divided, and what a member then does differently."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

from autopipe.ir.graph import Graph, Node
from autopipe.ir.teams.axes import (
    ADDED_BEFORE_BIAS,
    CROSS_ENTROPY,
    LOOKED_UP,
    MULTIHEAD,
    PICKED,
    Axis,
    Entry,
    Place,
    Rewrite,
    Sum,
)
from autopipe.trace.axes.dimension_factors import Dims
from autopipe.trace.axes.find import Reading

_WITH_BIAS = (ADDED_BEFORE_BIAS, MULTIHEAD)  # what is added after the sum is not an entry
_BY_INDEX = (LOOKED_UP, CROSS_ENTROPY, PICKED)  # a member has one range of the indices

_OFTEN = ("taken apart", "a dimension of the batch")  # reasons of sizes beside the one that could be an axis


@dataclass(frozen=True)
class ModelAxes:
    """The axes of a model, and why the other parameters are whole."""

    axes: tuple[Axis, ...]
    whole: dict[str, str]  # parameter without an axis -> why


class Collector:
    """Turns a ``Reading`` into axes."""

    def __init__(self, graph: Graph, reading: Reading) -> None:
        self._graph = graph
        self._reading = reading
        self._leaves = reading.leaves
        self._reasons = reading.leaves.whole()
        self._varying = reading.leaves.varying()
        self._values: dict[int, list[Place]] = defaultdict(list)
        self._state: dict[int, list[Place]] = defaultdict(list)
        self._carriers: dict[str, set[int]] = defaultdict(set)  # value or state -> leaves
        self._taking_part: dict[int, list[Node]] = defaultdict(list)
        self._with_gradient = {n.name for n in graph.nodes if n.spec is not None and n.spec.requires_grad}
        self._storage: dict[str, str] = {}  # value -> the value that owns its memory
        for node in graph.nodes:
            self._storage[node.name] = self._storage.get(node.storage, node.storage) or node.name
        changed = {value for node in graph.nodes for value in (*node.mutates, *node.buffers_written)}
        self._changed = {self._storage.get(value, value) for value in changed}

    def collect(self) -> ModelAxes:
        """Return the axes, in the order of the model's parameters."""
        self._place_all()
        roles = self._roles()
        axes: list[Axis] = []
        names: dict[str, int] = defaultdict(int)
        for leaf in dict.fromkeys(leaf for name in self._graph.parameters for leaf in sorted(self._carriers[name])):
            if leaf in self._reasons:
                continue
            axis = self._axis(leaf, roles, names)
            if axis is not None:
                axes.append(axis)
        covered = {place.name for axis in axes for place in axis.parameters}
        return ModelAxes(tuple(axes), {name: self._why(name) for name in self._graph.parameters if name not in covered})

    def _place_all(self) -> None:
        for name, dims in self._reading.state.items():
            self._place(name, dims, self._state)
        for name, result in self._reading.values.items():
            if isinstance(result, list):
                self._place(name, result, self._values)
            else:  # several tensors have no place; the calls that pick one do
                for part in result:
                    self._place(name, part or [], defaultdict(list))
        for node in self._graph.nodes:
            read = (*node.inputs, *node.parameters, *node.buffers, *node.constants, node.name)
            for leaf in set().union(*(self._carriers.get(name, set()) for name in read)):
                self._taking_part[leaf].append(node)

    def _place(self, name: str, dims: Dims, places: dict[int, list[Place]]) -> None:
        """Record which leaves a tensor carries, and where."""
        once: set[int] = set()
        for at, dimension in enumerate(dims):
            carried, hidden = self._leaves.carried(dimension, self._varying)
            for leaf in hidden:
                self._reasons.setdefault(leaf, "a part of a dimension only")
            for leaf, segments in carried.items():
                if leaf in once:
                    self._reasons.setdefault(leaf, "two dimensions of one tensor")
                once.add(leaf)
                places[leaf].append(Place(name, at, segments))
                self._carriers[name].add(leaf)

    def _roles(self) -> _ByLeaf:
        by_leaf = _ByLeaf()
        for node, how, leaves in self._reading.roles.sums:
            if how in _BY_INDEX and len(self._leaves.flat(leaves)) > 1:
                for leaf in self._leaves.everything(leaves):
                    self._reasons.setdefault(leaf, "an index that is divided in two ways")
            for leaf in dict.fromkeys(self._leaves.everything(leaves)):
                by_leaf.sums[leaf][node] = how
        for node, path, value, leaves in self._reading.roles.literals:
            for leaf in dict.fromkeys(self._leaves.everything(leaves)):
                by_leaf.rewrites[leaf].append(Rewrite(node, path, value))
        for node, leaves in self._reading.roles.draws:
            for leaf in self._leaves.everything(leaves):
                by_leaf.draws[leaf].add(node)
        return by_leaf

    def _axis(self, leaf: int, roles: _ByLeaf, names: dict[str, int]) -> Axis | None:
        size, places = self._leaves.size[leaf], self._state[leaf]
        parameters = [place for place in places if place.name in self._graph.parameters]
        sums = roles.sums[leaf]
        if not sums:
            self._reasons.setdefault(leaf, "never added over")
            return None
        nodes = self._taking_part[leaf]
        entries, partial = self._entering(leaf, nodes, sums)
        memory = {self._storage.get(value, value) for value in entries} | {place.name for place in places}
        if memory & self._changed:
            self._reasons.setdefault(leaf, "a value that enters it is changed in place")
            return None
        name = f"{_common_module([place.name for place in parameters])}/{size}"
        names[name] += 1
        return Axis(
            name=name if names[name] == 1 else f"{name}#{names[name]}",
            size=size,
            parameters=tuple(parameters),
            values=tuple(self._values[leaf]),
            state=tuple(place for place in places if place.name not in self._graph.parameters),
            rewrites=tuple(roles.rewrites[leaf]),
            entries=tuple(Entry(value, tuple(readers)) for value, readers in entries.items()),
            sums=tuple(Sum(node.name, sums[node.name]) for node in nodes if node.name in sums),
            partial=tuple(partial),
            draws=tuple(node.name for node in nodes if node.num_random and node.name in roles.draws[leaf]),
            nodes=tuple(node.name for node in nodes),
        )

    def _entering(
        self, leaf: int, nodes: list[Node], sums: dict[str, str]
    ) -> tuple[dict[str, list[str]], dict[str, None]]:
        """Return the values that enter, with their readers, and the whole parameters that the nodes read."""
        entries: dict[str, list[str]] = {}
        partial: dict[str, None] = {}
        for node in nodes:
            after = self._after_the_sum(node) if sums.get(node.name) in _WITH_BIAS else set()
            for value in node.inputs:
                if leaf not in self._carriers[value] and value not in after and value in self._with_gradient:
                    entries.setdefault(value, []).append(node.name)
            for name in node.parameters:
                if (
                    leaf not in self._carriers[name]
                    and name not in after
                    and self._graph.parameters[name].requires_grad
                ):
                    partial[name] = None
        return entries, partial

    def _after_the_sum(self, node: Node) -> set[str]:
        aliases = self._graph.aliases
        return {aliases.get(name, name) for at, name in self._reading.roles.biases if at == node.name}

    def _why(self, name: str) -> str:
        dims = self._reading.state.get(name)
        if dims is None:
            return "not read by a call that is followed"
        leaves = [leaf for dimension in dims for leaf in self._leaves.everything(dimension)]
        reasons = [self._reasons[leaf] for leaf in leaves if leaf in self._reasons] or ["never added over"]
        return next((why for why in reasons if why not in _OFTEN), reasons[0])


class _ByLeaf:
    def __init__(self) -> None:
        self.sums: dict[int, dict[str, str]] = defaultdict(dict)
        self.draws: dict[int, set[str]] = defaultdict(set)
        self.rewrites: dict[int, list[Rewrite]] = defaultdict(list)


def _common_module(parameters: list[str]) -> str:
    """Return the path of the module that has all these parameters."""
    paths = [name.split(".")[:-1] for name in parameters]
    levels = itertools.takewhile(lambda names: len({*names}) == 1, zip(*paths, strict=False))
    return ".".join(names[0] for names in levels) or "model"

"""Compare the state of an optimizer over some parameters with that of one over more, as each parameter sees it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from autopipe import sparse
from autopipe.bits import same_bits
from autopipe.runtime.training_state.describe import Description
from autopipe.runtime.training_state.nodes import SEQUENCES, Node, groups_of, is_per_group, kind_of

_TENSORS = ("tensor", "array", "generator")
ABSENT: Node = {"is": "absent"}
"""In place of a value that one of the two does not have."""


def differing(part: Description, whole: Description, names: Collection[str]) -> Iterator[tuple[str, Any, Any]]:
    """Iterate (path, value, value in ``whole``) of what differs in a state over ``names``, some of those of ``whole``.

    The groups and the states of parameters are compared by the parameters' names. What belongs to other parameters, and
    a value that the state over ``names`` does not have at all, are left out.
    """
    for root, node in part.tree.items():
        if root in whole.tree:
            yield from _Pair(part, whole, names).nodes(node, whole.tree[root], root)


class _Pair:
    def __init__(self, part: Description, whole: Description, names: Collection[str]) -> None:
        self.ours, self.theirs, self.names = part.tensors, whole.tensors, names
        self.groups_of_both = [groups_of(state.tree.get("optimizer")) for state in (part, whole)]

    def nodes(self, one: Node, two: Node, path: str) -> Iterator[tuple[str, Any, Any]]:
        kind, other = kind_of(one), kind_of(two)
        if {kind, other} & {"same", "live"}:  # it was compared where it is described; it is the hook's own
            return
        if "by_parameter" in (kind, other) and {kind, other} <= {"by_parameter", "dict"}:
            yield from self.by_parameter(one, two, path)
        elif kind != other:
            yield path, one, two
        elif kind == "groups":
            yield from self.groups(one, two, path)
        elif kind in _TENSORS:
            ours, theirs = self.ours.get(one.get("name", "")), self.theirs.get(two.get("name", ""))
            if ours is not None and theirs is not None and not same_bits(ours, theirs):
                yield path, ours, theirs
            elif "name" not in one and "name" not in two and {**one, "shape": 0} != {**two, "shape": 0}:
                yield path, one, two  # described without values; a member of a team has a part of each tensor
        elif kind in SEQUENCES:
            yield from self.sequence(one, two, path)
        elif kind in ("dict", "state") and one["class"] != two["class"]:
            yield path, one, two
        elif kind in ("dict", "state"):
            field, shape = ("items", "[{!r}]") if kind == "dict" else ("attributes", ".{}")
            before = {repr(key): value for key, value in two[field]}
            for key, value in one[field]:
                yield from self.entry(value, before, repr(key), path + shape.format(key))
        elif kind == "random":
            yield from self.nodes(one["state"], two["state"], f"{path}.state")
        elif one != two or type(one) is not type(two):
            yield path, one, two

    def entry(self, value: Node, before: Mapping[str, Node], key: str, path: str) -> Iterator[tuple[str, Any, Any]]:
        if key in before:
            yield from self.nodes(value, before[key], path)
        else:
            yield path, value, ABSENT

    def sequence(self, one: Node, two: Node, path: str) -> Iterator[tuple[str, Any, Any]]:
        lengths = [len(node["items"]) for node in (one, two)]
        places = [[index] for index in range(lengths[0])]
        if is_per_group(path, lengths, [len(groups) for groups in self.groups_of_both]):
            ours, theirs = self.groups_of_both
            places = [[at for at, names in enumerate(theirs) if not set(group).isdisjoint(names)] for group in ours]
        elif lengths[0] != lengths[1]:
            yield path, one, two
            return
        for index, entries in enumerate(places):
            for at in entries:
                yield from self.nodes(one["items"][index], two["items"][at], f"{path}[{index}]")

    def by_parameter(self, one: Node, two: Node, path: str) -> Iterator[tuple[str, Any, Any]]:
        ours, theirs = (dict(node["items"]) if kind_of(node) == "by_parameter" else {} for node in (one, two))
        for name, value in ours.items():
            yield from self.entry(value, theirs, name, f"{path}[{name}]")
        for name in theirs.keys() & set(self.names) - ours.keys():
            yield f"{path}[{name}]", ABSENT, theirs[name]

    def groups(self, one: Node, two: Node, path: str) -> Iterator[tuple[str, Any, Any]]:
        places = {name: group["values"] for group in two["groups"] for name in group["params"]}
        for index, group in enumerate(one["groups"]):
            for values in {id(places[name]): places[name] for name in group["params"] if name in places}.values():
                for key, value in group["values"].items():
                    yield from self.entry(value, values, key, f"{path}[{index}][{key!r}]")


def distance(one: Any, two: Any) -> float:
    """Return by how much a number or a tensor differs from ``two``, relative to its largest value; else infinity."""
    if type(one) in (int, float) and type(two) in (int, float):
        one, two = torch.tensor(float(one)), torch.tensor(float(two))
    if (
        not (isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor))
        or one.shape != two.shape
        or not one.numel()
    ):
        return float("inf")
    ours, expected = (sparse.wide(tensor) for tensor in (one, two))
    largest = expected.nan_to_num().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((ours - expected).nan_to_num(float("inf")).abs().max() / largest)

"""Merge the states of several stages into one, for a stage that owns other parameters than any of them.

The state of a parameter or group comes from the stage that owned the parameter. State of the complete optimizer (a step
count, a generator) is restored if all stages agree on it, and refused otherwise: such a state belongs to one cut of the
model, and only that cut can continue from it. A value that nothing reads is that of the first stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopipe.runtime.training_state.nodes import LIVE, SEQUENCES, Node, groups_of, is_per_group, kind_of
from autopipe.runtime.training_state.restore import MisfitError

SameTensor = Callable[[str, str], bool]
Unread = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Source:
    """One stage of the checkpoint."""

    tree: Mapping[str, Node]
    # before the first step
    initial: Mapping[str, Node]

    @property
    def groups(self) -> list[list[str]]:
        """The names of the parameters in each group of the optimizer."""
        return groups_of(self.tree["optimizer"])


def merge(
    sources: Sequence[Source], live: Mapping[str, Node], names: Sequence[str], same_tensor: SameTensor, unread: Unread
) -> dict[str, Node]:
    """Return the description for a stage that owns ``names``. ``live`` describes what its hooks build now.

    ``unread``: whether no code reads the value at a path.

    Raises: MisfitError if the stages differ in state that belongs to all parameters.
    """
    merger = _Merger(sources, live, set(names), same_tensor, unread)
    return {
        root: merger.node([s.tree[root] for s in sources], [s.initial.get(root) for s in sources], live.get(root), root)
        for root in sources[0].tree
        if all(root in source.tree for source in sources)
    }


class _Merger:
    def __init__(
        self,
        sources: Sequence[Source],
        live: Mapping[str, Node],
        names: set[str],
        same_tensor: SameTensor,
        unread: Unread,
    ) -> None:
        self.names, self.same_tensor, self.unread = names, same_tensor, unread
        self.membership = [source.groups for source in sources]
        self.groups = groups_of(live["optimizer"])
        self.place = {
            name: (stage, index)
            for stage, groups in enumerate(self.membership)
            for index, group in enumerate(groups)
            for name in group
        }
        self.owned = {name for groups in self.membership for group in groups for name in group}
        self.paths: list[dict[str, Node]] = []
        for source in sources:
            known: dict[str, Node] = {}
            for root, node in source.tree.items():
                _index(node, root, known)
            self.paths.append(known)

    def node(self, nodes: Sequence[Node], initials: Sequence[Node], live: Node, path: str) -> Node:
        """Return the merged node of all stages."""
        if all(node == initial for node, initial in zip(nodes, initials, strict=True)):
            return LIVE  # never for tensors and generators: their names are not in an initial description
        nodes = [self.resolved(stage, node) for stage, node in enumerate(nodes)]
        kinds = {kind_of(node) for node in nodes}
        if kinds <= {"by_parameter", "dict"} and "by_parameter" in kinds:
            return self.by_parameter(nodes, path)
        if len(kinds) > 1:
            raise self.differs(path)
        kind = kinds.pop()
        method = getattr(self, f"_{kind}", None)
        if method is not None:
            return method(nodes, initials, live, path)
        if kind in ("tensor", "array", "generator"):
            return self.one(nodes, path, tensor=True)
        return self.one(nodes, path)

    def resolved(self, stage: int, node: Node) -> Node:
        """Return the node that an alias names, if its path depends on the cut."""
        if kind_of(node) == "same" and "[" in node["as"]:
            return self.paths[stage].get(node["as"], node)
        return node

    def one(self, nodes: Sequence[Node], path: str, *, tensor: bool = False) -> Node:
        first = nodes[0]
        for other in nodes[1:]:
            alike = other == first
            if tensor:
                alike = kind_of(other) == kind_of(first) and {**other, "name": ""} == {**first, "name": ""}
                alike = alike and self.same_tensor(first["name"], other["name"])
            if not alike and not self.unread(path):
                raise self.differs(path)
        return first

    def differs(self, path: str) -> MisfitError:
        return MisfitError(
            path, "differs between the stages of the checkpoint, so only the same stages can resume from it"
        )

    # -- per parameter and per group -------------------------------------------------------------------------------

    def by_parameter(self, nodes: Sequence[Node], path: str) -> Node:
        items = []
        for node in nodes:
            if kind_of(node) == "dict" and node["items"]:
                raise self.differs(path)
            items += [pair for pair in node["items"] if pair[0] in self.names]
        first = next(node for node in nodes if kind_of(node) == "by_parameter")
        return {**first, "items": items}

    def _groups(self, nodes: Sequence[Node], initials: Sequence[Node], live: Node, path: str) -> Node:
        groups: list[Node] = []
        for index, group in enumerate(live["groups"] if kind_of(live) == "groups" else []):
            matching = [self.of_group(nodes, name, path) for name in group["params"]]
            empty = [n["groups"][index]["values"] for n in nodes if index < len(n["groups"])]
            if not matching:
                values = empty[0] if empty and all(e == empty[0] for e in empty) else group["values"]
                groups.append({"params": [], "values": dict.fromkeys(values, LIVE) if not empty else values})
                continue
            for name, other in zip(group["params"], matching, strict=True):
                self.alike(matching[0], other, f"{path}[{index}]", f"{group['params'][0]} and {name}")
            groups.append({"params": group["params"], "values": matching[0]})
        return {"is": "groups", "groups": groups}

    def of_group(self, nodes: Sequence[Node], name: str, path: str) -> dict[str, Node]:
        for stage, node in enumerate(nodes):
            for group in node["groups"]:
                if name in group["params"]:
                    return {key: self.resolved(stage, value) for key, value in group["values"].items()}
        raise MisfitError(path, f"has no group with {name} in the checkpoint")

    def alike(self, first: Mapping[str, Node], other: Mapping[str, Node], path: str, who: str) -> None:
        if first is other or first == other:
            return
        keys = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        for key in keys:
            one, two = first.get(key), other.get(key)
            tensors = kind_of(one) == "tensor" == kind_of(two)
            alike = tensors and one and two and self.same_tensor(one["name"], two["name"])
            if not alike and not self.unread(f"{path}[{key!r}]"):
                raise MisfitError(f"{path}[{key!r}]", f"is one value for {who} now, and was two in the checkpoint")

    def per_group(self, items: Sequence[Sequence[Node]], live: int | None, path: str) -> list[Node] | None:
        """Return the entries of a list by the groups of the new stage. None: it does not have one entry per group."""
        counts = [*(len(groups) for groups in self.membership), len(self.groups)]
        lengths = [*(len(entries) for entries in items), counts[-1] if live is None else live]
        if not is_per_group(path, lengths, counts):
            return None
        entries = []
        for index, group in enumerate(self.groups):
            stages = {self.place[name] for name in group if name in self.place} or {(0, min(index, counts[0] - 1))}
            candidates = [items[stage][place] for stage, place in sorted(stages)]
            entries.append(self.one(candidates, f"{path}[{index}]", tensor=kind_of(candidates[0]) == "tensor"))
        return entries

    # -- structures ------------------------------------------------------------------------------------------------

    def _list(self, nodes: Sequence[Node], initials: Sequence[Node], live: Node, path: str) -> Node:
        items = [[self.resolved(stage, item) for item in node["items"]] for stage, node in enumerate(nodes)]
        length = len(live["items"]) if kind_of(live) == kind_of(nodes[0]) else None
        mapped = self.per_group(items, length, path)
        if mapped is not None:
            return {**nodes[0], "items": mapped}
        if any(kind_of(item) == "parameter" for entries in items for item in entries):
            raise self.differs(path)
        if len({len(entries) for entries in items}) > 1:
            raise self.differs(path)
        return {**nodes[0], "items": self.zipped(items, initials, live, path)}

    def zipped(self, items: Sequence[Sequence[Node]], initials: Sequence[Node], live: Node, path: str) -> list[Node]:
        merged = []
        for index in range(len(items[0])):
            before = [_at(initial, index) for initial in initials]
            merged.append(self.node([e[index] for e in items], before, _at(live, index), f"{path}[{index}]"))
        return merged

    _tuple = _size = _deque = _list

    def _dict(self, nodes: Sequence[Node], initials: Sequence[Node], live: Node, path: str) -> Node:
        keys = [[_text(key) for key, _ in node["items"]] for node in nodes]
        if any(set(k) != set(keys[0]) for k in keys):
            if all(key in self.owned for k in keys for key in k):  # keyed by the names of parameters
                return {**nodes[0], "items": [pair for n in nodes for pair in n["items"] if pair[0] in self.names]}
            raise self.differs(path)
        return {**nodes[0], "items": self.pairs("items", nodes, initials, live, path, "[{}]")}

    def _state(self, nodes: Sequence[Node], initials: Sequence[Node], live: Node, path: str) -> Node:
        if len({node["class"] for node in nodes}) > 1:
            raise self.differs(path)
        keys = [{_text(key) for key, _ in node["attributes"]} for node in nodes]
        if any(k != keys[0] for k in keys):
            raise self.differs(path)
        return {**nodes[0], "attributes": self.pairs("attributes", nodes, initials, live, path, ".{}")}

    def pairs(
        self, field: str, nodes: Sequence[Node], initials: Sequence[Node], live: Node, path: str, shape: str
    ) -> list[Any]:
        by_key = [{_text(key): value for key, value in node[field]} for node in nodes]
        before = [_pairs(initial, field) for initial in initials]
        now = _pairs(live, field)
        merged = []
        for key, _ in nodes[0][field]:
            text = _text(key)
            place = path + shape.format(key if shape.startswith(".") else repr(key))
            entries = [entry[text] for entry in by_key]
            merged.append([key, self.node(entries, [b.get(text) for b in before], now.get(text), place)])
        return merged

    def _random(self, nodes: Sequence[Node], initials: Sequence[Node], live: Node, path: str) -> Node:
        before = [initial.get("state") if isinstance(initial, dict) else None for initial in initials]
        return {**nodes[0], "state": self.node([node["state"] for node in nodes], before, None, f"{path}.state")}


def _text(key: Node) -> str:
    return key if isinstance(key, str) else repr(key)


def _at(node: Node, index: int) -> Node:
    items = node.get("items", ()) if isinstance(node, dict) else ()
    return items[index] if index < len(items) else None


def _pairs(node: Node, field: str) -> dict[str, Node]:
    pairs = node.get(field, ()) if isinstance(node, dict) else ()
    return {_text(key): value for key, value in pairs} if isinstance(pairs, list) else {}


def _index(node: Node, path: str, known: dict[str, Node]) -> None:
    """Record the node at every path, with the paths of ``describe``."""
    if not isinstance(node, dict):
        return
    known[path] = node
    kind = node["is"]
    if kind == "groups":
        for index, group in enumerate(node["groups"]):
            for key, value in group["values"].items():
                _index(value, f"{path}[{index}][{key!r}]", known)
    elif kind in ("dict", "by_parameter"):
        for key, value in node["items"]:
            _index(value, f"{path}[{key}]" if kind == "by_parameter" else f"{path}[{key!r}]", known)
    elif kind in SEQUENCES:
        for index, item in enumerate(node["items"]):
            _index(item, f"{path}[{index}]", known)
    elif kind == "state":
        for key, value in node["attributes"]:
            _index(value, f"{path}.{key}", known)

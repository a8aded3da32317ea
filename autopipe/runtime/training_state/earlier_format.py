"""Read the training state of checkpoints written before states were state dicts. For one release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopipe.runtime.training_state.nodes import LIVE, Node, kind_of
from autopipe.runtime.training_state.restore import MisfitError

_OF_OPTIMIZER = ("state", "param_groups")


def upgraded(tree: Mapping[str, Node]) -> dict[str, Node]:
    """Return the state of a stage as state dicts: unchanged if it has them, else made of the attributes it has.

    Raises: MisfitError for an optimizer or scheduler that is not of torch, of which only the attributes are known.
    """
    if not any(kind_of(node) == "object" for node in tree.values()):
        return dict(tree)
    reader, states = _Reader(), {}
    for name, node in tree.items():
        if not str(node.get("class", "")).startswith("torch.optim."):
            raise MisfitError(
                f"the {name}",
                f"is a {node.get('class')} in a checkpoint of an earlier version, which has no state_dict of it",
            )
        attributes = reader.pairs(node["attributes"], name, ".{}")
        own = [[key, value] for key, value in attributes if name != "optimizer" or key in _OF_OPTIMIZER]
        states[name] = {"is": "state", "class": node["class"], "attributes": own}
    return states


class _Reader:
    def __init__(self) -> None:
        self.known: dict[str, Node] = {}

    def pairs(self, pairs: list[Any], path: str, shape: str) -> list[list[Any]]:
        return [[key, self.node(value, path + shape.format(key))] for key, value in pairs if key != "optimizer"]

    def node(self, node: Node, path: str) -> Node:
        self.known[path] = converted = self.converted(node, path)
        return converted

    def converted(self, node: Node, path: str) -> Node:
        kind = kind_of(node)
        if kind == "plain":
            return node
        if kind == "same":
            return self.known.get(node["as"], LIVE)
        if kind == "object":  # a scheduler in another, or the function of a LambdaLR
            pairs = self.pairs(node["attributes"], path, ".{}")
            return {"is": "dict", "class": "dict", "items": pairs}
        if kind in ("function", "partial", "method", "code", "hooks", "live"):
            return None if kind == "function" and ".lr_lambdas[" in path else LIVE
        if kind in ("dict", "by_parameter"):
            shape = "[{!r}]" if kind == "dict" else "[{}]"
            items = [[key, self.node(value, path + shape.format(key))] for key, value in node["items"]]
            return {**node, "items": items} | ({"class": "dict"} if path == "optimizer.state" else {})
        if kind == "groups":
            groups = []
            for index, group in enumerate(node["groups"]):
                values = {k: self.node(v, f"{path}[{index}][{k!r}]") for k, v in group["values"].items()}
                groups.append({**group, "values": values})
            return {**node, "groups": groups}
        if "items" in node:
            return {**node, "items": [self.node(item, f"{path}[{i}]") for i, item in enumerate(node["items"])]}
        return node

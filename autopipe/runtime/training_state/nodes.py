"""The typed JSON of a state. Plain values represent themselves; all others are objects whose ``is`` names the kind.

==================  ================================================================================================
kind                further keys
==================  ================================================================================================
float, complex      ``value``: the text of a number that JSON does not support
bytes               ``hex``
list, tuple, set,   ``items``; deque also ``maxlen``; ``class`` for a subclass or a named tuple
frozenset, deque
dict                ``items``: pairs; ``class``: dict, OrderedDict, defaultdict, Counter or a subclass; ``factory``
by_parameter        a dict whose keys are parameters. ``items``: pairs of the parameter's name and a node; ``class``
parameter           ``name``
groups              ``param_groups``: ``groups``, each with ``params`` (names) and ``values`` (name -> node)
hooks               ``items``: the hooks of an optimizer, in order
tensor              ``name`` in the file, ``dtype``, ``shape``, ``strides``, ``host``: it is on the CPU although its
                    parameter is not; ``trained``, of a parameter that is not the model's: whether it has gradients
array, scalar       numpy's: ``dtype``, ``shape``, and ``name`` of a tensor of bytes, or ``hex``
generator           ``device`` and ``name``, the tensor of its state
random              ``random.Random`` and numpy's generators: ``class``, ``state``
object              ``class``, ``attributes``: pairs
function            ``name``, ``cells``, ``defaults``, ``keywords``, ``attributes``
method              ``name``, ``self``
partial             ``function``, ``arguments``, ``keywords``
enum                ``class``, ``name``
same                ``as``: the path of an object that was described before
code                ``name``: a value without state, such as a class or a module
live                use what the hook builds; only ``merge`` writes it
==================  ================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Node = Any
"""A plain JSON value, or a dict with the key ``is``."""

LIVE: Node = {"is": "live"}


class UnstorableError(Exception):
    """A value that a checkpoint cannot hold.

    ``path``: of the value, such as ``optimizer.log``. ``why``: the reason, as the rest of a sentence. ``remedy``: the
    advice for this kind, "" for the usual one.
    """

    def __init__(self, path: str, why: str, remedy: str = "") -> None:
        super().__init__(f"{path} {why}")
        self.path, self.why, self.remedy = path, why, remedy


def kind_of(node: Node) -> str:
    """Return the kind of a node, "plain" for a value that represents itself."""
    return str(node["is"]) if isinstance(node, dict) else "plain"


def name_of(thing: Any) -> str:
    """Return the full name of a class or function."""
    return f"{getattr(thing, '__module__', None) or 'builtins'}.{getattr(thing, '__qualname__', repr(thing))}"


def children(node: Node) -> Iterator[Node]:
    """Iterate the nodes inside a node."""
    if not isinstance(node, dict):
        return
    kind = node["is"]
    if kind in ("list", "tuple", "set", "frozenset", "deque", "hooks"):
        yield from node["items"]
    elif kind in ("dict", "by_parameter"):
        yield from (value for _, value in node["items"])
    elif kind == "groups":
        for group in node["groups"]:
            yield from group["values"].values()
    elif kind == "object":
        yield from (value for _, value in node["attributes"])
    elif kind == "function":
        yield from node["cells"].values()
        yield from (node["defaults"], node["keywords"], *node["attributes"].values())
    elif kind == "method":
        yield node["self"]
    elif kind == "partial":
        yield from (node["function"], node["arguments"], node["keywords"])
    elif kind == "random":
        yield node["state"]


_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "float": {"value": str},
    "complex": {"value": str},
    "bytes": {"hex": str},
    **{kind: {"items": list} for kind in ("list", "tuple", "set", "frozenset", "hooks")},
    "deque": {"items": list, "maxlen": (int, type(None))},
    "dict": {"items": list, "class": str},
    "by_parameter": {"items": list, "class": str},
    "parameter": {"name": str},
    "groups": {"groups": list},
    "tensor": {"dtype": str, "shape": list},
    "array": {"dtype": str, "shape": list},
    "scalar": {"dtype": str, "hex": str},
    "generator": {"device": str},
    "random": {"class": str, "state": object},
    "object": {"class": str, "attributes": list},
    "function": {"name": str, "cells": dict, "defaults": object, "keywords": object, "attributes": dict},
    "method": {"name": str, "self": object},
    "partial": {"function": object, "arguments": object, "keywords": object},
    "enum": {"class": str, "name": str},
    "same": {"as": str},
    "code": {"name": str},
}


def malformed(node: Node) -> str:
    """Return the error in a node from a file, "" if it has the form that ``describe`` writes."""
    if isinstance(node, list):
        return "a list without a kind"
    if not isinstance(node, dict):
        return ""
    kind = node.get("is")
    if not isinstance(kind, str) or kind not in _FIELDS:
        return f"an unknown kind {str(kind)[:40]!r}"
    for field, wanted in _FIELDS[kind].items():
        if field not in node or not isinstance(node[field], wanted):
            return f"a {kind} without its {field}"
    pairs = node.get("attributes") if kind == "object" else node["items"] if kind in ("dict", "by_parameter") else ()
    named = kind in ("object", "by_parameter")
    for pair in pairs or ():
        if not isinstance(pair, list) or len(pair) != 2 or (named and not isinstance(pair[0], str)):
            return f"a {kind} whose entries are not pairs"
    for group in node["groups"] if kind == "groups" else ():
        names = group.get("params") if isinstance(group, dict) else None
        if not isinstance(names, list) or not isinstance(group.get("values"), dict):
            return "a group without parameters and values"
        if not all(isinstance(name, str) for name in names):
            return "a group of parameters without names"
    return next((text for child in children(node) if (text := malformed(child))), "")


def tensor_names(node: Node) -> list[str]:
    """Return the names of the tensors that a node needs from the file."""
    own = [node["name"]] if kind_of(node) in ("tensor", "array", "generator") and node.get("name") else []
    return own + [name for child in children(node) for name in tensor_names(child)]

"""The typed JSON of a state. Plain values represent themselves; all others are objects whose ``is`` names the kind.

==================  ================================================================================================
kind                further keys
==================  ================================================================================================
state               the state_dict of an optimizer or a scheduler: ``class`` of the object, ``attributes``: pairs
float, complex      ``value``: the text of a number that JSON does not support
bytes               ``hex``
list, tuple, set,   ``items``; deque also ``maxlen``; size is a ``torch.Size``
frozenset, deque,
size
dict                ``items``: pairs; ``class``: dict, OrderedDict, defaultdict or Counter; ``factory``
by_parameter        a dict whose keys are parameters. ``items``: pairs of the parameter's name and a node; ``class``
parameter           ``name``
groups              ``param_groups``: ``groups``, each with ``params`` (names) and ``values`` (name -> node)
tensor              ``name`` in the file, ``dtype``, ``shape``, ``strides``, ``host``: it is on the CPU although its
                    parameter is not; ``trained``, of a parameter that is not the model's: whether it has gradients
array, scalar       numpy's: ``dtype``, ``shape``, and ``name`` of a tensor of bytes, or ``hex``
generator           ``device`` and ``name``, the tensor of its state
random              ``random.Random`` and numpy's generators: ``class``, ``state``
enum                ``class``, ``name``
same                ``as``: the path of a value that was described before
code                ``name``: a function, class or object, which is that of the hook
live                use what the hook builds; no checkpoint has it
==================  ================================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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
    if kind in SEQUENCES:
        yield from node["items"]
    elif kind in PAIRS:
        yield from (value for _, value in node[PAIRS[kind]])
    elif kind == "groups":
        for group in node["groups"]:
            yield from group["values"].values()
    elif kind == "random":
        yield node["state"]


def groups_of(node: Node) -> list[list[str]]:
    """Return the parameters of each group of a described optimizer, or of the first optimizer nested in it."""
    if kind_of(node) == "groups":
        return [group["params"] for group in node["groups"]]
    return next((groups for child in children(node) if (groups := groups_of(child))), [])


def is_per_group(path: str, lengths: Sequence[int], counts: Sequence[int]) -> bool:
    """Return whether sequences at a path of several states have one entry for each group of their optimizers.

    ``counts``: the numbers of groups. Equal numbers do not tell, so only the lists of torch's schedulers count then.
    """
    if 0 in counts or list(lengths) != list(counts):
        return False
    return len(set(counts)) > 1 or re.findall(r"\w+", path)[-1] in _PER_GROUP


_PER_GROUP = ("base_lrs", "_last_lr", "max_lrs", "min_lrs", "lr_lambdas", "base_momentums", "max_momentums")
SEQUENCES = ("list", "tuple", "size", "set", "frozenset", "deque")
PAIRS = {"dict": "items", "by_parameter": "items", "state": "attributes"}
"""Kind -> the field that has pairs of a key and a node."""
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "float": {"value": str},
    "complex": {"value": str},
    "bytes": {"hex": str},
    **{kind: {"items": list} for kind in SEQUENCES},
    "deque": {"items": list, "maxlen": (int, type(None))},
    "dict": {"items": list, "class": str},
    "by_parameter": {"items": list, "class": str},
    "state": {"attributes": list, "class": str},
    "parameter": {"name": str},
    "groups": {"groups": list},
    "tensor": {"dtype": str, "shape": list},
    "array": {"dtype": str, "shape": list},
    "scalar": {"dtype": str, "hex": str},
    "generator": {"device": str},
    "random": {"class": str, "state": object},
    "enum": {"class": str, "name": str},
    "same": {"as": str},
    "code": {"name": str},
    "live": {},
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
    for pair in node[PAIRS[kind]] if kind in PAIRS else ():
        if not isinstance(pair, list) or len(pair) != 2 or (kind != "dict" and not isinstance(pair[0], str)):
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

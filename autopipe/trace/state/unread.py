"""Values of a batch that neither forward nor loss reads: file names, ids, lines of text beside their tokens.

A Python value of the batch is a constant of the captured graph, so another value needs another capture. One that
nothing reads needs none. To tell, forward and loss run with an object in its place that fails whenever anything is
asked of it but its type.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopipe.trace.state.check import Look
from autopipe.trace.state.observe import is_users_file
from autopipe.workload import Item, Workload
from autopipe.workload.batches.items import paths

TYPES = (str, bytes, int, float)
"""Of these types no two values are told apart by identity, as ``None``, ``True`` and members of an enum are."""
_MOST_GROUPS = 16  # of values, each of which takes two runs
_DEEPEST = 4  # containers inside of containers that are searched for a value
_OTHERS = (
    "__array__", "__call__", "__complex__", "__copy__", "__deepcopy__", "__fspath__", "__matmul__", "__rmatmul__",
    "__reversed__", "__next__", "__setitem__", "__delitem__", "__enter__", "__exit__", "__await__",
)  # fmt: skip
_NEEDED = ("__new__", "__init__", "__class__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__doc__")


def unread_paths(workload: Workload, model: nn.Module, item: Item, module: fx.GraphModule) -> tuple[str, ...]:
    """Return the paths of the values in a batch that forward and loss do not read. The model is left as it was.

    ``module``: the captured graph. Where it calls functions of the user's own, nothing is known of any value.
    """
    leaves, structure = pytree.tree_flatten(item)
    named = list(paths(item))
    groups: dict[str, list[int]] = {}
    for place, (path, leaf) in enumerate(named):
        if type(leaf) in TYPES:
            groups.setdefault(_container(path), []).append(place)
    if not groups or len(groups) > _MOST_GROUPS or any(_is_users_call(node) for node in module.graph.nodes):
        return ()
    hooks = workload.functions() if hasattr(workload, "functions") else {}
    look = Look(workload, model, item, hooks)
    names: list[str] = []
    for places in groups.values():
        seen: list[str] = []
        changed = list(leaves)
        for place in places:
            changed[place] = _stand_in(type(leaves[place]), seen)
        if _runs(look, pytree.tree_unflatten(changed, structure), seen):
            names.extend(named[place][0] for place in places)
    return tuple(names)


def _container(path: str) -> str:
    """Return the path of the list or tuple that a leaf is in, that of the leaf itself where it is in none."""
    head, bracket, key = path.rpartition("[")
    return head if bracket and key[:-1].isdigit() else path


def _is_users_call(node: fx.Node) -> bool:
    """Tell whether a node calls code that is no operation of torch's, or an autograd function: it may look inside."""
    if node.op != "call_function":
        return False
    owner = getattr(node.target, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return True
    code = getattr(node.target, "__code__", None)
    return code is not None and is_users_file(code.co_filename)


def _runs(look: Look, item: Item, seen: list[str]) -> bool:
    """Tell whether forward and loss run twice and read no stand-in. The second run may read what the first one kept."""

    def profile(frame: types.FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "return" or "type" not in code.co_names or not is_users_file(code.co_filename):
            return
        if code.co_name.startswith("<") or _holds(frame.f_locals, _DEEPEST):
            seen.append("type")  # type(value), which no object can notice

    before = sys.getprofile()
    with look.restored():
        sys.setprofile(profile)
        try:
            for _ in range(2):
                look.run(item)
        except Exception:
            return False
        finally:
            sys.setprofile(before)
    return not seen


def _holds(value: Any, depth: int) -> bool:
    """Tell whether a value is a stand-in, or a container that one is in."""
    if isinstance(type(value), _Kind):
        return True
    if depth and isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return any(_holds(entry, depth - 1) for entry in (value.values() if isinstance(value, Mapping) else value))
    return False


class _Kind(type):
    """The class of the classes of stand-ins, by which they are known."""


def _stand_in(kind: type, seen: list[str]) -> Any:
    """Return an object that passes for one of ``kind`` in ``isinstance``; any other use is noted and raises."""

    def read(self: Any, *_: Any, **__: Any) -> Any:
        seen.append("value")
        raise TypeError("a value of the batch is read")

    def attribute(self: Any, name: str) -> Any:
        return kind if name == "__class__" else read(self)

    names = {name for one in TYPES for name in dir(one) if name.startswith("__")} | set(_OTHERS)
    return _Kind("value", (), {**dict.fromkeys(names - set(_NEEDED), read), "__getattribute__": attribute})()

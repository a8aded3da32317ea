"""Find values of a batch that neither forward nor loss reads: file names, ids, lines of text that accompany tokens.

A Python value of the batch is a constant of the captured graph, so another value needs another capture, unless nothing
reads it. To find out, forward and loss run with a placeholder that fails on any access except to its type.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopipe.devices import reraise_failure_of_device
from autopipe.trace.lines.draws import profiled_by
from autopipe.trace.state.repeats import restored, run_once
from autopipe.users_code import is_model_file
from autopipe.workload import Item, Workload
from autopipe.workload.batches.items import paths

TYPES = (str, bytes, int, float)
"""Types whose values are not compared by identity, unlike ``None``, ``True`` and enum members."""
_MOST_GROUPS = 16  # groups of values; each needs two runs
_DEEPEST = 4  # nesting depth of containers that are searched for a value
_OTHERS = (
    "__array__", "__call__", "__complex__", "__copy__", "__deepcopy__", "__fspath__", "__matmul__", "__rmatmul__",
    "__reversed__", "__next__", "__setitem__", "__delitem__", "__enter__", "__exit__", "__await__",
)  # fmt: skip
_NEEDED = ("__new__", "__init__", "__class__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__doc__")


def unread_paths(workload: Workload, model: nn.Module, item: Item, module: fx.GraphModule) -> tuple[str, ...]:
    """Return the paths of the values in a batch that forward and loss do not read. The model is restored.

    ``module``: the captured graph. If it calls the user's own functions, the result is empty: they may read any value.
    """
    leaves, structure = pytree.tree_flatten(item)
    named = list(paths(item))
    groups: dict[str, list[int]] = {}
    for place, (path, leaf) in enumerate(named):
        if type(leaf) in TYPES:
            groups.setdefault(_container(path), []).append(place)
    if not groups or len(groups) > _MOST_GROUPS or any(_is_users_call(node) for node in module.graph.nodes):
        return ()
    names: list[str] = []
    for places in groups.values():
        seen: list[str] = []
        changed = list(leaves)
        for place in places:
            changed[place] = _stand_in(type(leaves[place]), seen)
        if _runs(workload, model, pytree.tree_unflatten(changed, structure), seen):
            names.extend(named[place][0] for place in places)
    return tuple(names)


def _container(path: str) -> str:
    """Return the path of the list or tuple that contains a leaf, or the leaf's own path."""
    head, bracket, key = path.rpartition("[")
    return head if bracket and key[:-1].isdigit() else path


def _is_users_call(node: fx.Node) -> bool:
    """Return whether a node calls user code or an autograd function, which may read Python values."""
    if node.op != "call_function":
        return False
    owner = getattr(node.target, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return True
    code = getattr(node.target, "__code__", None)
    return code is not None and is_model_file(code.co_filename)


def _runs(workload: Workload, model: nn.Module, item: Item, seen: list[str]) -> bool:
    """Return whether forward and loss run twice without reading a placeholder; the second run may use kept state."""

    def profile(frame: types.FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "return" or "type" not in code.co_names or not is_model_file(code.co_filename):
            return
        if code.co_name.startswith("<") or _holds(frame.f_locals, _DEEPEST):
            seen.append("type")  # type(value), which an object cannot intercept

    with restored(workload, model):
        try:
            with profiled_by(profile):
                for _ in range(2):
                    run_once(workload, model, item)
        except Exception as error:
            reraise_failure_of_device(error)
            return False
    return not seen


def _holds(value: Any, depth: int) -> bool:
    """Return whether a value is a placeholder or a container with one."""
    if isinstance(type(value), _Kind):
        return True
    if depth and isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return any(_holds(entry, depth - 1) for entry in (value.values() if isinstance(value, Mapping) else value))
    return False


class _Kind(type):
    """The metaclass that identifies the classes of placeholders."""


def _stand_in(kind: type, seen: list[str]) -> Any:
    """Return an object that passes ``isinstance(value, kind)``; any other use is recorded and raises."""

    def read(self: Any, *_: Any, **__: Any) -> Any:
        seen.append("value")
        raise TypeError("a value of the batch is read")

    def attribute(self: Any, name: str) -> Any:
        return kind if name == "__class__" else read(self)

    names = {name for one in TYPES for name in dir(one) if name.startswith("__")} | set(_OTHERS)
    return _Kind("value", (), {**dict.fromkeys(names - set(_NEEDED), read), "__getattribute__": attribute})()

"""Flatten and rebuild objects that contain tensors of a batch, so that they are cut like tuples.

torch's pytrees support tuples, lists, dicts and named tuples. Dataclasses, classes with attributes or slots, and
subclasses of containers are registered there when a batch with such an object is read. Their contents become leaves,
and a microbatch gets another object of the same class, created without its constructor. Classes that a library has
registered itself stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

_DEEPEST = 6  # levels of nested objects


def register_objects(item: Any) -> None:
    """Register the classes of all objects in a batch that contain tensors."""
    for _ in range(_DEEPEST):
        kinds = {type(leaf) for leaf in pytree.tree_leaves(item) if _holds_tensors(leaf, _DEEPEST)}
        if not kinds:
            return
        for kind in kinds:
            _register(kind)


def _holds_tensors(value: Any, depth: int) -> bool:
    kind = type(value)
    known = kind.__module__ == "builtins" or kind in pytree.SUPPORTED_NODES or hasattr(kind, "__next__")
    if not depth or isinstance(value, (Tensor, nn.Module, type)) or known:
        return False
    inside = pytree.tree_leaves(list(_parts(value)))
    return any(isinstance(entry, Tensor) or _holds_tensors(entry, depth - 1) for entry in inside)


def _parts(value: Any) -> list[Any]:
    """Return the contents of an object: its entries, if it is a container, and its attributes."""
    return [entry for _, entry in _keyed(value)]


def _keyed(value: Any) -> list[tuple[Any, Any]]:
    keyed: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        keyed += [(pytree.MappingKey(key), dict.__getitem__(value, key)) for key in dict.__iter__(value)]
    elif isinstance(value, (list, tuple)):
        keyed += [(pytree.SequenceKey(index), entry) for index, entry in enumerate(value)]
    keyed += [(pytree.GetAttrKey(name), getattr(value, name)) for name in _attributes(value)]
    return keyed


def _attributes(value: Any) -> list[str]:
    """Return the names of the attributes of an object, those in slots included."""
    names = list(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                names.append(name)
    return list(dict.fromkeys(names))


def _register(kind: type) -> None:
    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        keyed = _keyed(value)
        return [entry for _, entry in keyed], tuple(key for key, _ in keyed)

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        keyed = _keyed(value)
        return keyed, tuple(key for key, _ in keyed)

    def unflatten(entries: Any, keys: tuple[Any, ...]) -> Any:
        return _rebuilt(kind, dict(zip(keys, entries, strict=True)))

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


def _rebuilt(kind: type, entries: Mapping[Any, Any]) -> Any:
    """Return an object of a class with these entries and attributes, without calling its constructor."""
    items = [entry for key, entry in entries.items() if isinstance(key, pytree.SequenceKey)]
    value: Any = tuple.__new__(kind, items) if issubclass(kind, tuple) else kind.__new__(kind)
    if issubclass(kind, list):
        list.extend(value, items)
    elif issubclass(kind, dict):
        dict.update(value, {key.key: entry for key, entry in entries.items() if isinstance(key, pytree.MappingKey)})
    for key, entry in entries.items():
        if isinstance(key, pytree.GetAttrKey):
            object.__setattr__(value, key.name, entry)
    return value

"""Batches that a ``DataLoader`` gets from workers: these belong to the first process, which passes each one on.

Nothing is read ahead: the script's own loader does what it would do without the check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import dataloader

from autopipe.script.codec import UnsendableError
from autopipe.script.wire import Wire

_PLAIN = (bool, int, float, complex, str, type(None), Tensor)
_NEXT = "__next__"
Workers = dataloader._MultiProcessingDataLoaderIter
Base = dataloader._BaseDataLoaderIter


def form_of(value: Any) -> Any:
    """Return a batch as values of ``codec``. Raises: UnsendableError."""
    kind = type(value)
    if kind in _PLAIN:
        return ["value", value]
    if kind is np.ndarray and value.dtype.kind in "biufc":
        return ["array", torch.from_numpy(np.ascontiguousarray(value)), list(value.shape)]
    if kind in (list, tuple):
        return [kind.__name__, *map(form_of, value)]
    if kind is dict:
        return ["dict", *([form_of(key), form_of(entry)] for key, entry in value.items())]
    name = [kind.__module__, kind.__qualname__]
    if _class_of(*name) is kind:
        if isinstance(value, tuple) and hasattr(kind, "_fields") and not hasattr(value, "__dict__"):
            return ["named", name, *map(form_of, value)]
        plain = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
        if plain and kind.__basicsize__ <= object.__basicsize__ + 16 and hasattr(value, "__dict__"):
            return ["object", name, form_of(vars(value))]
    raise UnsendableError(f"{kind.__module__}.{kind.__qualname__}")


def value_of(form: Any) -> Any:
    """Return the batch of a form."""
    kind, *rest = form
    match kind:
        case "value":
            return rest[0]
        case "array":
            return rest[0].numpy().reshape(rest[1])
        case "list":
            return [value_of(entry) for entry in rest]
        case "tuple":
            return tuple(value_of(entry) for entry in rest)
        case "dict":
            return {value_of(key): value_of(entry) for key, entry in rest}
        case "named":
            return _class_of(*rest[0])(*map(value_of, rest[1:]))
    batch = object.__new__(_class_of(*rest[0]))
    vars(batch).update(value_of(rest[1]))
    return batch


def _class_of(module: str, name: str) -> Any:
    place: Any = sys.modules.get(module)
    for part in name.split("."):
        place = getattr(place, part, None)
    return place


def pass_on(send: Callable[[Any], None]) -> None:
    """Send each batch of workers that this process gets from now on."""
    following = Base.__next__

    def passed(iterator: Any) -> Any:
        try:
            batch = following(iterator)
        except StopIteration:
            send(["end"])
            raise
        try:
            send(["batch", form_of(batch)])
        except UnsendableError as error:
            send(["unknown", str(error)])
        return batch

    setattr(Workers, _NEXT, passed)


def pass_no_more() -> None:
    """Stop that."""
    if _NEXT in vars(Workers):
        delattr(Workers, _NEXT)


def follow(wire: Wire, stop: Callable[[str], Any]) -> None:
    """Take the batches of workers from the first process. What the loader itself draws, it draws here, too."""

    def drawn(iterator: Any, count: int) -> None:
        try:
            for _ in range(count):
                iterator._next_index()
        except StopIteration:
            pass

    def begun(iterator: Any, loader: Any) -> None:
        Base.__init__(iterator, loader)
        iterator._prefetch_factor = loader.prefetch_factor
        reset(iterator, loader)

    def reset(iterator: Any, loader: Any, first_iter: bool = False) -> None:
        Base._reset(iterator, loader, first_iter)
        drawn(iterator, iterator._prefetch_factor * iterator._num_workers)

    def following(iterator: Any) -> Any:
        if not wire.ready():
            wire.send({"waits": True})
        kind, *rest = wire.receive()
        if kind == "end":
            raise StopIteration
        if kind == "unknown":
            stop(f"has batches of {rest[0]}, which workers have made,")
        drawn(iterator, 1)
        iterator._num_yielded += 1
        return value_of(rest[0])

    changes = {"__init__": begun, "_reset": reset, "__next__": following}
    for name, change in changes.items():
        setattr(Workers, name, change)
    for name in ("_shutdown_workers", "__del__"):
        setattr(Workers, name, lambda iterator: None)

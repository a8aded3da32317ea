"""Compute the form of a batch: its structure, and all values in it that are not tensors."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import functools
import hashlib
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopipe.errors import ModelFileError, with_article
from autopipe.ir.batch import BatchForm
from autopipe.workload.batches.items import Item, paths
from autopipe.workload.batches.layouts import order_of, strides_of

_LONGEST = 80  # characters of a value; a longer one is replaced by its digest
_DEEPEST = 6  # levels of nested objects
_PLAIN = (type(None), bool, int, float, complex, str, bytes, slice, range)
_VALUES = (torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout, pathlib.PurePath, decimal.Decimal)
_TIMES = (datetime.date, datetime.time, datetime.timedelta)
_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType)


def form_of(item: Item) -> BatchForm:
    """Return the form of a batch. It depends on the batch alone, and takes about 30 microseconds for a few leaves.

    Raises: ModelFileError naming a leaf whose value cannot be compared with that of another batch.
    """
    leaves, structure = pytree.tree_flatten(item)
    try:
        text, places = _structure(structure, isinstance(item, tuple))
    except TypeError:  # a container of the user whose context is not hashable
        text, places = _structure.__wrapped__(structure, isinstance(item, tuple))
    described = tuple([_leaf(leaf, path) for leaf, path in zip(leaves, places, strict=True)])
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return BatchForm(
        text, places, described, tuple([order_of(t) for t in tensors]), tuple([strides_of(t) for t in tensors])
    )


@functools.lru_cache(maxsize=256)
def _structure(structure: pytree.TreeSpec, pair: bool) -> tuple[str, tuple[str, ...]]:
    empty = pytree.tree_unflatten([0] * structure.num_leaves, structure)
    return " ".join(repr(structure).split()), tuple(path for path, _ in paths(empty))


def _leaf(leaf: Any, path: str) -> str:
    if isinstance(leaf, Tensor):
        kind = "" if type(leaf) is Tensor else f"{type(leaf).__name__} "
        grad = ", with a gradient" if leaf.requires_grad else ""
        return f"tensor {kind}{str(leaf.dtype).removeprefix('torch.')}, {leaf.dim()} dimensions{grad}"
    text = value_text(leaf)
    if text is None:
        raise ModelFileError(
            f"the batch has {with_article(type(leaf).__name__)} at {path}, which cannot be compared with that of "
            "another batch",
            remedy="give its numbers as tensors, or remove it from the batch",
        )
    return text


def value_text(value: Any, depth: int = 0) -> str | None:
    """Return a text that is equal only for equal values; None if a value has no such text."""
    if type(value) in _PLAIN or isinstance(value, (*_VALUES, *_TIMES)):
        text = repr(value)
        if len(text) > _LONGEST:
            text = f"{text[:20]}... {hashlib.sha256(text.encode('utf-8', 'backslashreplace')).hexdigest()[:16]}"
        return text if type(value) in _PLAIN else f"{type(value).__name__} {text}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, (np.generic, np.ndarray)) and not value.dtype.hasobject:
        digest = "" if value.ndim == 0 else " " + hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
        return f"{value.dtype}{list(value.shape)}{digest or f' {value.item()!r}'}"
    if isinstance(value, _FUNCTIONS):
        return f"{value.__module__}.{value.__qualname__}"
    if depth > _DEEPEST or isinstance(value, nn.Module):
        return None
    return _inside(value, depth + 1)


def _inside(value: Any, depth: int) -> str | None:
    """Return the text of an object from its contents."""
    parts: list[str | None]
    if isinstance(value, Mapping):
        parts = [part for key in value for part in (value_text(key, depth), value_text(value[key], depth))]
    elif isinstance(value, (set, frozenset)):
        entries = [value_text(entry, depth) for entry in value]
        parts = [None] if None in entries else [*sorted(entry for entry in entries if entry is not None)]
    elif isinstance(value, (list, tuple)):
        parts = [value_text(entry, depth) for entry in value]
    elif dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        fields = vars(value) if hasattr(value, "__dict__") else {}
        slots = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        named = {**fields, **{name: getattr(value, name, None) for name in slots}}
        parts = [part for name, entry in named.items() for part in (name, value_text(entry, depth))]
    else:
        return None
    if None in parts:
        return None
    text = ", ".join(part for part in parts if part is not None)
    if len(text) > _LONGEST:
        text = f"{text[:20]}... {hashlib.sha256(text.encode('utf-8', 'backslashreplace')).hexdigest()[:16]}"
    return f"{type(value).__qualname__}({text})"

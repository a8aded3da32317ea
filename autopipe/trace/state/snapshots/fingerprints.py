"""Fingerprints of values: what is compared to see whether a place changed."""

from __future__ import annotations

import gc
import hashlib
import itertools
import operator
import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autopipe.bits import bytes_of

LARGEST = 65_536  # elements of the largest tensor whose content is compared
PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
ITERATORS: tuple[type, ...] = (
    itertools.count,
    itertools.cycle,
    enumerate,
    itertools.accumulate,
    types.GeneratorType,
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
    type(iter(range(2**64))),
    type(iter("")),
    type(iter(b"")),
    type(iter({})),
    type(iter({}.values())),
    type(iter({}.items())),
    type(iter(set())),
    type(reversed([])),
    itertools.repeat,
)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_CONTENT: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("_io.BytesIO", "_io.StringIO"), lambda stream: (stream.tell(), hash(stream.getvalue()))),
    **{f"_io.{name}": operator.methodcaller("tell") for name in ("TextIOWrapper", "FileIO")},
    **{f"_io.Buffered{name}": operator.methodcaller("tell") for name in ("Random", "Reader", "Writer")},
    "sqlite3.Connection": operator.attrgetter("total_changes"),
    "mmap.mmap": lambda memory: (memory.tell(), hash(memory[:LARGEST])),
    "_csv.reader": operator.attrgetter("line_num"),
    "_thread.lock": operator.methodcaller("locked"),
    "_thread.RLock": lambda lock: repr(lock).partition(" object")[0],
    "numpy.flatiter": operator.attrgetter("index"),
    "numpy.random.bit_generator.SeedSequence": operator.attrgetter("n_children_spawned"),
}
"""Types of C and of numpy whose objects have a content: how it is compared."""


def fingerprint(value: Any) -> tuple[Any, ...]:
    """Return the fingerprint of a value: the content of a plain value, the identity of any other.

    A tuple of plain values comes with its entries, for whom it shows where they changed: they are not compared.
    """
    if type(value) in PLAIN:
        return "==", (type(value), repr(value) if isinstance(value, (float, complex)) else value)
    if isinstance(value, FakeTensor):  # it has no content
        return "==", (value.dtype, tuple(value.shape))
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        if value.layout == torch.strided and value.numel() <= LARGEST and not value.is_meta:
            content = bytes_of(value.cpu()).numpy().tobytes()
            return "==", (value.dtype, value.shape, hashlib.sha256(content).digest())
        return "is", value
    if isinstance(value, np.generic) and not value.dtype.hasobject and value.size <= LARGEST:
        return "==", (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, tuple):  # torch.Size too
        values = tuple(tuple.__iter__(value))
        if all(type(entry) in PLAIN for entry in values):
            return "==", (type(value), repr(values)), values
    return "is", value


def same_value(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Compare two fingerprints."""
    if len(one) != len(other) or not one or one[0] != other[0]:
        return not one and not other
    return one[1] is other[1] if one[0] == "is" else bool(one[1] == other[1])


def is_plain_key(key: Any) -> bool:
    """Return whether a dict key can be compared without running user code: plain, a class, or a tuple of those."""
    if type(key) in (tuple, frozenset):
        return all(is_plain_key(entry) for entry in key)
    return type(key) in PLAIN or (isinstance(key, type) and type(key).__eq__ is object.__eq__)


def drawn(value: Any) -> Any:
    """Return the state of a random generator, or the progress of an iterator."""
    if isinstance(value, random.Random):
        return value.getstate() if type(value) is not random.SystemRandom else None
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False)["state"])
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy().tobytes())
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return (
            None
            if frame is None
            else (frame.f_lasti, repr({k: v for k, v in frame.f_locals.items() if type(v) in PLAIN}))
        )
    if isinstance(value, itertools.accumulate):
        return repr([entry for entry in gc.get_referents(value) if type(entry) in PLAIN])
    if isinstance(value, enumerate):
        return value.__reduce__()[1][1]
    if isinstance(value, itertools.cycle):
        (rest,), (first, _) = _parts_of_cycle(value)
        return operator.length_hint(rest, -1), len(first)
    return repr(value) if isinstance(value, itertools.count) else operator.length_hint(value, -1)


def content_of(value: Any) -> Any:
    """Return the content of a stream, hash, lock, exception or iterator of C, or None for any other value.

    The content of an iterator whose progress is unknown is never equal to another.
    """
    kind = type(value)
    if kind in weakref.ProxyTypes or any(value is stream for stream in (sys.stdin, sys.stdout, sys.stderr)):
        return None
    try:
        if isinstance(value, BaseException):
            parts = (*value.args, *getattr(value, "__notes__", ()))
            return tuple(entry if type(entry) in PLAIN else id(entry) for entry in parts)
        if isinstance(value, np.random.BitGenerator):
            return repr(value.state)
        read = _CONTENT.get(f"{kind.__module__}.{kind.__qualname__}")
        if read is not None:
            return read(value)
        if hasattr(kind, "hexdigest") and hasattr(kind, "copy"):
            return value.copy().hexdigest()
    except (ValueError, OSError, TypeError):  # a closed file, or a pipe
        return None
    return object() if hasattr(kind, "__next__") else None


def _parts_of_cycle(value: Any) -> Any:
    """Return the iterator of a cycle, the entries that it keeps, and whether it repeats them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 deprecates it
        return value.__reduce__()[1:]

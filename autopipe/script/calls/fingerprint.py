"""What a forward may read besides its arguments: a value that changes when the recorded code would no longer be right.

It covers plain attributes of the modules and of the objects in them (configurations), the mode of every module, which
parameters train, hooks, and what else the forwards may read (``reached``). Tensors that are neither parameter nor
buffer are compared by their bytes, because a mask may be made again with the same numbers; very large ones by identity
and version.
"""

from __future__ import annotations

import array
import contextvars
import functools
import itertools
import types
import weakref
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from autopipe.bits import bytes_of
from autopipe.script.calls.accesses import Reads, is_read
from autopipe.script.calls.contents import DEPTH, MOST, PLAIN, attributes_of, attributes_of_module, is_code, of_hidden
from autopipe.script.calls.reached import Reached
from autopipe.script.settings import autocast_now
from autopipe.script.state.remote import is_remote
from autopipe.trace.record.containers import CONTAINERS, PLAIN_CONTAINERS, attributes, copied
from autopipe.trace.state.snapshots.fingerprints import GENERATORS, ITERATORS, content_of, drawn
from autopipe.trace.state.snapshots.kinds import behind
from autopipe.trace.state.snapshots.places import ByIdentity

_EXACT = frozenset((bool, int, str, bytes, type(None), torch.dtype, torch.device))
_COMPARED = (*PLAIN, Tensor, np.ndarray, list, tuple, set, frozenset, dict)  # others count if the forward names them
_TOO_MANY = 1 << 17  # entries of a container that are not compared
_SMALL = 1 << 14  # elements of a tensor whose bytes are kept
_LARGE = 1 << 22  # elements of a tensor that is compared by its bytes
OF_A_MODULE = "module"
"""Begins the place of an attribute: then come the number of the module and the name."""
_MOST_KNOWN = 16
_MOST_SEARCHES = 8  # of models of the same classes
_MOST_CONTENTS = 128
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(slots=True)
class _Search:
    """What a search has found. ``contents``: values, with which it would find the same."""

    code: Reached
    contents: set[Hashable] = field(default_factory=set)


_KNOWN: dict[Hashable, list[_Search]] = {}
"""Searches by the classes of the modules, the last used first."""


def signature_of(flat: list[Any], form: Any, model: nn.Module, reads: Reads) -> Hashable | None:
    """Return what decides which recording a call needs; None if an argument is neither tensor nor number.

    ``flat``, ``form``: the arguments as pytree gives them. ``reads``: what the forwards so far have read.
    """
    entries: list[Hashable] = []
    for value in flat:
        if isinstance(value, Tensor):
            entries.append((tuple(value.shape), tuple(value.stride()), value.dtype, str(value.device)))
        elif isinstance(value, PLAIN):
            entries.append(_of_plain(value))
        else:
            return None
    with torch._C.DisableTorchFunctionSubclass():
        trained = tuple(parameter.requires_grad for parameter in model.parameters())
    return (
        str(form),
        tuple(entries),
        trained,
        fingerprint(model, reads),
        autocast_now(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
    )


def fingerprint(model: nn.Module, reads: Reads = None) -> Hashable:
    """Return the value for a model at this moment. ``reads``: the attributes that count."""
    modules = list(model.modules())
    _, content = _searched(modules, reads)
    registered: list[Hashable] = []
    for module in modules:
        for tensors in (module._modules, module._parameters, module._buffers):
            registered.append(len(tensors))
            registered.extend(map(id, tensors.values()))
    return content, tuple(registered), tuple(tuple(map(id, hooks.values())) for hooks in _hooks_of_all_modules())


def reached(model: nn.Module) -> Reached:
    """Return the places that the forwards of a model may read at this moment."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():  # a call that is recorded asks, too
        return _searched(list(model.modules()), None)[0].code


def _searched(modules: list[nn.Module], reads: Reads) -> tuple[_Search, Hashable]:
    """Return the search of the code, and the values at its places.

    The values have the identity of every function and class that the search has found. So an earlier search holds for
    values that it has led to before, as long as no class and no globals have got another number of names.
    """
    kinds = tuple(dict.fromkeys(map(type, modules)))
    searches = _KNOWN.get(kinds)
    if searches is None:
        while len(_KNOWN) >= _MOST_KNOWN:  # each keeps its objects alive
            del _KNOWN[next(iter(_KNOWN))]
        searches = _KNOWN[kinds] = []
    for position, search in enumerate(searches):
        search.code.registered = {id(module): module for module in modules}
        content = _contents(modules, search.code, reads)
        if (content, search.code.sizes()) in search.contents:
            searches.insert(0, searches.pop(position))
            return search, content
    code = Reached(kinds, modules)
    search = next((search for search in searches if search.code.same(code)), _Search(code))
    search.code = code
    if search not in searches:
        searches.insert(0, search)
        del searches[_MOST_SEARCHES:]
    if len(search.contents) >= _MOST_CONTENTS:
        search.contents.clear()
    content = _contents(modules, code, reads)
    search.contents.add((content, code.sizes()))
    return search, content


def places(
    model: nn.Module, code: Reached, kept: list[tuple[Any, Any]] | None = None
) -> Iterator[tuple[Hashable, str, Hashable]]:
    """Yield (place, its name, what identifies its value) for attributes of modules and what the code reaches.

    Registered tensors are left out. ``kept``: receives containers and namespaces with their content, to be restored.
    With it, random generators, iterators and streams are compared by their progress, too.
    """
    description = _Description(code, kept)
    for number, (path, module) in enumerate(model.named_modules()):
        for key, value in attributes_of_module(module):
            content = description.of_attribute(key, value)
            yield (OF_A_MODULE, number, key), f"{path}.{key}" if path else key, content
    yield from code.values(description.of)


def _contents(modules: list[nn.Module], code: Reached, reads: Reads) -> Hashable:
    """Return what identifies the values at all places. Every call of the model waits for it."""
    description = _Description(code, None)
    entries: list[Any] = [reads]
    for module in modules:
        for key, value in attributes_of_module(module):
            if not is_read(reads, module, key):
                continue
            kind = type(value)
            if kind in _EXACT:
                entries += (key, kind, value)
            elif kind not in PLAIN_CONTAINERS or value:  # most are the empty dictionaries of hooks
                entries += (key, description.of_attribute(key, value))
    entries.extend([content for _, _, content in code.values(description.of)])
    return tuple(entries)


class _Description:
    """Identifies values. The arguments are those of ``places``."""

    def __init__(self, code: Reached, kept: list[tuple[Any, Any]] | None) -> None:
        self.code, self.kept = code, kept
        self._described: dict[int, tuple[int, int, Any]] = {}  # values: levels, number; the value, so that it lives
        self._results: dict[int, Hashable] = {}
        self._numbers = itertools.count()

    def of_attribute(self, key: str, value: Any) -> Hashable:
        """Return what identifies an attribute of a module."""
        unread = not isinstance(value, _COMPARED) and not is_code(value) and not self.code.reads(key)
        return id(value) if unread else self.of(value, DEPTH)

    def of(self, value: Any, depth: int) -> Hashable:
        """Return what identifies a value, looking ``depth`` levels in."""
        kind: Any = type(value)
        if kind in _EXACT:
            return (kind, value)
        if kind in PLAIN_CONTAINERS and not value:
            if self.kept is not None:
                self.kept.append((value, copied(value)))
            return (kind,)
        if isinstance(value, PLAIN):
            return _of_plain(value)
        if is_remote(value):
            return ("parameter", id(value))
        if isinstance(value, Tensor):
            return _of_tensor(value)
        if is_code(value):
            return ByIdentity(value)
        if isinstance(value, np.ndarray):
            return ("array", value.shape, str(value.dtype), self._of_array(value, depth))
        if isinstance(value, (bytearray, array.array)):
            return (kind.__name__, bytes(value))
        if isinstance(value, nn.Module) and id(value) in self.code.registered:
            return id(value)
        levels, number, _ = self._described.get(id(value), (-1, 0, None))
        if levels >= depth:  # it is compared there
            # a forward may add another way to it, which is then the first one
            return ("again", number) if self.kept is None else self._results.get(id(value), ("inside", id(value)))
        self._described[id(value)] = (depth, next(self._numbers), value)
        result = self._results[id(value)] = self._of_holder(value, depth)
        return result

    def _of_holder(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, nn.Module):
            return self._of_hidden(value, depth)
        if isinstance(value, contextvars.ContextVar):
            return ("variable", self.of(value.get(None), depth))
        if isinstance(value, weakref.ref):
            return ("reference", self.of(value(), depth))
        if isinstance(value, types.MappingProxyType):
            return ("proxy", id(value), self._of_container(dict(value), depth))
        if isinstance(value, functools.partial):
            return ("partial", self.of(value.func, depth), self.of((value.args, value.keywords), depth))
        if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
            name = value.__name__ if isinstance(value, types.BuiltinMethodType) else ""  # a partial may be the function
            return ("method", name, *(self.of(part, depth) for part in behind(value)))
        if self.kept is not None and isinstance(value, CONTAINERS):
            self.kept.append((value, copied(value)))
        if isinstance(value, (list, tuple, set, frozenset, deque, dict)):
            return self._of_container(value, depth)
        return self._of_object(value, depth)

    def _of_array(self, value: np.ndarray[Any, Any], depth: int) -> Hashable:
        if not value.dtype.hasobject:
            return hash(value.tobytes())
        return id(value) if depth <= 0 or value.size >= MOST else tuple(self.of(v, depth - 1) for v in value.flat)

    def _of_container(self, value: Any, depth: int) -> Hashable:
        if depth <= 0 or len(value) >= MOST:
            return (type(value), id(value), len(value), _of_many(value))
        if isinstance(value, dict):
            entries = [(self.of(key, 1), self.of(entry, depth - 1)) for key, entry in list(value.items())]
            return ("dict", type(value), *entries)
        return (type(value), *[self.of(entry, depth - 1) for entry in value])

    def _of_object(self, value: Any, depth: int) -> Hashable:
        progress: Hashable = None
        if self.kept is not None:
            if isinstance(value, (*GENERATORS, *ITERATORS)):
                progress = hash(str(drawn(value)))
            else:
                content = content_of(value)  # of unknown progress: an object, equal to no other
                progress = content if type(content) is object else hash(str(content))
        if depth <= 0:
            return (id(value), progress)
        own = attributes(value) or {}
        if self.kept is not None and own:
            self.kept.append((own, copied(own)))
        read = attributes_of(value, self.code)
        if read is None:
            return (id(value), progress)
        kind: Any = type(value)
        return (id(value), kind, progress, *[(key, self.of(entry, depth - 1)) for key, entry in read])

    def _of_hidden(self, module: nn.Module, depth: int) -> Hashable:
        """Identify a module that the forward uses and that is not registered in the model."""
        if depth <= 0:
            return id(module)
        read = of_hidden(module, self.code)
        return (id(module), type(module), *[(key, self.of(entry, depth - 1)) for key, entry in read])


def _of_plain(value: Any) -> Hashable:
    """Identify a number or text. A float counts as text, because 0.0 equals -0.0 and NaN does not equal itself."""
    return (type(value), repr(value) if isinstance(value, (float, complex)) else value)


def _of_many(value: Any) -> Hashable:
    """Return what identifies the entries of a large container, if they are numbers or text, or can be hashed."""
    if len(value) >= _TOO_MANY:
        return None
    entries, others = tuple(value), tuple(value.values()) if isinstance(value, dict) else ()
    try:
        return tuple((hash(some), hash(tuple(map(type, some))), _of_numbers(some)) for some in (entries, others))
    except TypeError:
        return None


def _of_numbers(entries: tuple[Any, ...]) -> int | None:
    """Return a hash of entries that are numbers, which tells -1 from -2: their own hashes are equal."""
    if not set(map(type, entries)) <= {int, float, bool}:
        return None
    return hash(np.asarray(entries).tobytes())


def _of_tensor(value: Tensor) -> Hashable:
    ordinary = type(value) is Tensor and value.layout == torch.strided and value.device.type in ("cpu", "cuda")
    if not ordinary or value.requires_grad or value.numel() > _LARGE:
        return ("tensor", id(value), value._version)
    content = bytes_of(value.cpu()).numpy().tobytes()
    form = (value.dtype, tuple(value.shape), tuple(value.stride()))
    return ("tensor", *form, content if value.numel() <= _SMALL else hash(content))


def _hooks_of_all_modules() -> list[dict[int, Any]]:
    place: Any = nn.modules.module
    return [getattr(place, f"_global{kind}") for kind in _HOOKS]


def hooks_of(model: nn.Module) -> str:
    """Return the path of a module with hooks that are not torch's own, "" without one."""
    if any(_hooks_of_all_modules()):
        return "torch.nn.modules.module"
    for path, module in model.named_modules():
        for kind in _HOOKS:
            for hook in getattr(module, kind).values():
                if not str(getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.nn.utils"):
                    return path or "the model"
    return ""

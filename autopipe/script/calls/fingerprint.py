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
import math
import sys
import types
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopipe.script.calls.reached import Reached, is_code
from autopipe.script.refusals import in_a_library
from autopipe.script.settings import autocast_now
from autopipe.script.state.remote import is_remote
from autopipe.trace.record.containers import CONTAINERS, attributes, copied
from autopipe.trace.state.snapshots.fingerprints import GENERATORS, ITERATORS, content_of, drawn
from autopipe.trace.state.snapshots.kinds import behind
from autopipe.trace.state.snapshots.places import slots

_PLAIN = (bool, int, float, str, complex, bytes, type(None), torch.dtype, torch.device)
_COMPARED = (*_PLAIN, Tensor, np.ndarray, list, tuple, set, frozenset, dict)  # others count if the forward names them
_VALUES = (*_PLAIN, Tensor, np.ndarray, set, frozenset)
_DEPTH = 4
_MOST = 1000  # entries of a container, or attributes of an object, that are compared
_TOO_MANY = 1 << 17  # entries of a container that are not compared
_SMALL = 1 << 14  # elements of a tensor whose bytes are kept
_LARGE = 1 << 22  # elements of a tensor that is compared by its bytes
OF_A_MODULE = "module"
"""Begins the place of an attribute: then come the number of the module and the name."""
_MOST_KNOWN = 16
_KNOWN: dict[Hashable, Reached] = {}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SKIPPED = {
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_flat_weights", "_flat_weight_refs",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
}  # fmt: skip


def signature_of(flat: list[Any], form: Any, model: nn.Module) -> Hashable | None:
    """Return what decides which recording a call needs; None if an argument is neither tensor nor number.

    ``flat``, ``form``: the arguments as pytree gives them.
    """
    entries: list[Hashable] = []
    for value in flat:
        if isinstance(value, Tensor):
            entries.append((tuple(value.shape), tuple(value.stride()), value.dtype, str(value.device)))
        elif isinstance(value, _PLAIN):
            entries.append((type(value).__name__, value))
        else:
            return None
    trained = tuple(parameter.requires_grad for parameter in model.parameters())
    return (
        str(form),
        tuple(entries),
        trained,
        fingerprint(model),
        autocast_now(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
    )


def fingerprint(model: nn.Module) -> Hashable:
    """Return the value for a model at this moment."""
    entries: list[Hashable] = [content for _, _, content in places(model, reached(model))]
    for module in model.modules():
        for registered in (module._modules, module._parameters, module._buffers):
            entries.append(tuple(map(id, registered.values())))
    entries.append(tuple(tuple(map(id, hooks.values())) for hooks in _hooks_of_all_modules()))
    return tuple(entries)


def reached(model: nn.Module) -> Reached:
    """Return the places that the forwards of a model may read, searched again when they lead elsewhere."""
    kinds = tuple({type(module): None for module in model.modules()})
    objects = tuple(
        value
        for module in model.modules()
        for key, value in vars(module).items()
        if key not in _SKIPPED and not isinstance(value, _VALUES) and value
    )
    key = (kinds, tuple(map(id, objects)))
    known = _KNOWN.get(key)
    if known is None or not known.current():
        while len(_KNOWN) >= _MOST_KNOWN:  # each keeps its objects alive
            del _KNOWN[next(iter(_KNOWN))]
        known = _KNOWN[key] = Reached(kinds, objects)
    return known


def places(
    model: nn.Module, places_of_code: Reached, kept: list[tuple[Any, Any]] | None = None
) -> Iterator[tuple[Hashable, str, Hashable]]:
    """Yield (place, its name, what identifies its value) for attributes of modules and what the code reaches.

    Registered tensors are left out. ``kept``: receives containers and namespaces with their content, to be restored.
    With it, random generators, iterators and streams are compared by their progress, too.
    """
    description = _Description(places_of_code, kept)
    for number, (path, module) in enumerate(model.named_modules()):
        for key, value in vars(module).items():
            if key in _SKIPPED:
                continue
            unread = not places_of_code.reads(key) and not isinstance(value, _COMPARED)
            content = id(value) if unread else description.of(value, _DEPTH)
            yield (OF_A_MODULE, number, key), f"{path}.{key}" if path else key, content
    yield from places_of_code.values(description.of)


class _Description:
    """Identifies values. The arguments are those of ``places``."""

    def __init__(self, code: Reached, kept: list[tuple[Any, Any]] | None) -> None:
        self.code, self.kept = code, kept

    def of(self, value: Any, depth: int) -> Hashable:
        """Return what identifies a value, looking ``depth`` levels in."""
        if isinstance(value, _PLAIN):
            return (type(value).__name__, repr(value) if isinstance(value, float) and math.isnan(value) else value)
        if is_remote(value):
            return ("parameter", id(value))
        if isinstance(value, Tensor):
            return _of_tensor(value)
        if isinstance(value, nn.Module) or is_code(value):
            return id(value)
        if isinstance(value, np.ndarray):
            content = id(value) if value.dtype.hasobject else hash(value.tobytes())
            return ("array", value.shape, str(value.dtype), content)
        if isinstance(value, (bytearray, array.array)):
            return (type(value).__name__, bytes(value))
        if isinstance(value, contextvars.ContextVar):
            return ("variable", self.of(value.get(None), depth))
        if isinstance(value, functools.partial):
            return ("partial", id(value.func), self.of((value.args, value.keywords), depth))
        if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
            return ("method", value.__name__, *(self.of(part, depth) for part in behind(value)))
        if self.kept is not None and isinstance(value, CONTAINERS):
            self.kept.append((value, copied(value)))
        if isinstance(value, (list, tuple, set, frozenset, deque, dict)):
            return self._of_container(value, depth)
        return self._of_object(value, depth)

    def _of_container(self, value: Any, depth: int) -> Hashable:
        if depth == 0 or len(value) >= _MOST:
            return (type(value).__name__, id(value), len(value), _of_many(value))
        if isinstance(value, dict):
            entries = [(self.of(key, 1), self.of(entry, depth - 1)) for key, entry in list(value.items())]
            return ("dict", type(value).__name__, *entries)
        return (type(value).__name__, *(self.of(entry, depth - 1) for entry in value))

    def _of_object(self, value: Any, depth: int) -> Hashable:
        progress: Hashable = None
        if self.kept is not None:
            if isinstance(value, (*GENERATORS, *ITERATORS)):
                progress = hash(str(drawn(value)))
            else:
                content = content_of(value)  # of unknown progress: an object, equal to no other
                progress = content if type(content) is object else hash(str(content))
        if depth == 0:
            return (id(value), progress)
        own = attributes(value) or {}
        if self.kept is not None and own:
            self.kept.append((own, copied(own)))
        every = [*own.items(), *slots(value).items()]
        if callable(value) and in_a_library(getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""):
            every = [(key, entry) for key, entry in every if isinstance(entry, (*_PLAIN, *CONTAINERS))]
        if len(every) >= _MOST:
            return (id(value), progress, len(every))
        return (id(value), progress, *((k, self.of(entry, depth - 1)) for k, entry in every if self.code.reads(k)))


def _of_many(value: Any) -> Hashable:
    """Return what identifies the entries of a large container, if all can be hashed."""
    if len(value) >= _TOO_MANY:
        return None
    try:
        return hash(tuple(value.items()) if isinstance(value, dict) else tuple(value))
    except TypeError:
        return None


def _of_tensor(value: Tensor) -> Hashable:
    ordinary = type(value) is Tensor and value.layout == torch.strided and value.device.type == "cpu"
    if not ordinary or value.requires_grad or value.numel() > _LARGE:
        return ("tensor", id(value), value._version)
    content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
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
                if not (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.nn.utils"):
                    return path or "the model"
    return ""

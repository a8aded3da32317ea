"""What a forward may read besides its arguments: a value that changes when the recorded code would no longer be right.

It covers plain attributes of the modules and of the objects in them (configurations), the mode of every module, which
parameters train, hooks, and the global numbers that the forwards name. Tensors that are neither parameter nor buffer
are compared by identity and version.
"""

from __future__ import annotations

import dis
import math
import types
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.script.capture import autocast_now

_PLAIN = (bool, int, float, str, complex, bytes, type(None), torch.dtype, torch.device)
_DEPTH = 4
_KNOWN: dict[type[nn.Module], list[tuple[tuple[str, ...], dict[str, Any]]]] = {}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SKIPPED = {
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_flat_weights", "_flat_weight_refs",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
}  # fmt: skip


def fingerprint(model: nn.Module) -> Hashable:
    """Return the value for a model at this moment."""
    entries: list[Hashable] = []
    for module in model.modules():
        for key, value in vars(module).items():
            if key not in _SKIPPED and not callable(value):
                entries.append((key, _of(value, _DEPTH)))
            elif key not in _SKIPPED:
                entries.append((key, id(value)))
        for registered in (module._modules, module._parameters, module._buffers):
            entries.append(tuple(map(id, registered.values())))
        entries.extend(_globals_of(type(module)))
    return tuple(entries)


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


def _of(value: Any, depth: int) -> Hashable:
    if isinstance(value, _PLAIN):
        return (type(value).__name__, repr(value) if isinstance(value, float) and math.isnan(value) else value)
    if isinstance(value, Tensor):
        return ("tensor", id(value), value._version)
    if isinstance(value, nn.Module) or depth == 0:
        return id(value)
    if isinstance(value, (list, tuple, set, frozenset)) and len(value) < 1000:
        return (type(value).__name__, *(_of(entry, depth - 1) for entry in value))
    if isinstance(value, dict) and len(value) < 1000:
        return ("dict", *((_of(key, 1), _of(entry, depth - 1)) for key, entry in value.items()))
    if isinstance(value, (type, types.ModuleType)) or callable(value):
        return id(value)
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict) and len(own) < 1000:
        return (id(value), *((key, _of(entry, depth - 1)) for key, entry in list(own.items())))
    return id(value)


def _globals_of(kind: type[nn.Module]) -> Iterator[Hashable]:
    for names, place in _named_globals(kind):
        for name in names:
            value = place.get(name)
            if isinstance(value, (bool, int, float, str, list, tuple, dict, Tensor)):
                yield name, _of(value, 2)


def _named_globals(kind: type[nn.Module]) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """Return the global names in the methods of a class that torch did not write, with the globals."""
    if kind in _KNOWN:
        return _KNOWN[kind]
    named: list[tuple[tuple[str, ...], dict[str, Any]]] = []
    for owner in kind.__mro__:
        if owner.__module__.startswith("torch."):
            continue
        for method in vars(owner).values():
            code = getattr(method, "__code__", None)
            if code is not None:
                named.append((tuple(_names(code)), method.__globals__))
    _KNOWN[kind] = named
    return named


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names that the code reads. ``co_names`` also has those of attributes."""
    yield from (str(step.argval) for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def hooks_of(model: nn.Module) -> str:
    """Return the path of a module with hooks that are not torch's own, "" without one."""
    everywhere: Any = nn.modules.module
    if any(getattr(everywhere, f"_global{kind}") for kind in _HOOKS):
        return "torch.nn.modules.module"
    for path, module in model.named_modules():
        for kind in _HOOKS:
            for hook in getattr(module, kind).values():
                if not (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.nn.utils"):
                    return path or "the model"
    return ""

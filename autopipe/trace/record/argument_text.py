"""The canonical text of a call's arguments: equal calls give equal texts, in every process and on every device."""

from __future__ import annotations

import enum
import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopipe import sparse
from autopipe.bits import bytes_of
from autopipe.trace.explain import type_name
from autopipe.trace.record.targets import qualified_name


def arguments_text(node: fx.Node, constants: Mapping[str, Tensor], module: nn.Module | None) -> str:
    """Return the text of a node's arguments. ``module``: the leaf that it calls, whose settings are included."""
    parts = [_text(arg, constants) for arg in node.args]
    parts += [f"{key}={_text(node.kwargs[key], constants)}" for key in sorted(node.kwargs)]
    text = f"({', '.join(parts)})"
    if node.meta.get("opaque") and module is not None:
        return f"{module!r} {code_digest(module)}{text}"  # the graph does not contain the calls inside
    return text if module is None else f"{module!r}{text}"


def code_digest(module: nn.Module) -> str:
    """Return 16 hex digits of the source of a module's classes, without torch's, and of their plain settings."""
    state = hashlib.sha256()
    for path, part in module.named_modules():
        kind = type(part)
        if kind.__module__.startswith("torch."):
            continue
        try:
            source = inspect.getsource(kind)
        except (OSError, TypeError):
            source = kind.__qualname__
        settings = {
            name: value
            for name, value in vars(part).items()
            if isinstance(value, (bool, int, float, str)) and name != "training" and not name.startswith("_")
        }
        state.update(f"{path} {source} {sorted(settings.items())}".encode())
    return state.hexdigest()[:16]


def _text(value: Any, constants: Mapping[str, Tensor]) -> str:
    if isinstance(value, fx.Node):
        return _reference(value, constants)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{type_name(value)}.{value.name}"
    if isinstance(value, torch.device):
        return "device"  # the device does not change the computation
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, slice):
        return f"{_text(value.start, constants)}:{_text(value.stop, constants)}:{_text(value.step, constants)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, constants) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_text(value[key], constants)}" for key in sorted(value, key=str)) + "}"
    if value is Ellipsis:
        return "..."
    return qualified_name(value) if callable(value) else type_name(value)


def _reference(node: fx.Node, constants: Mapping[str, Tensor]) -> str:
    if node.op != "get_attr":
        return f"%{node.name}"
    constant = constants.get(str(node.target))
    return f"self.{node.target}" if constant is None else f"{node.target}:{tensor_digest(constant)}"


def tensor_digest(tensor: Tensor) -> str:
    """Return 16 hex digits of a tensor's shape, dtype and bytes."""
    state = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    if not tensor.is_meta:
        for part in sparse.stored(tensor):
            state.update(bytes_of(part.cpu()).numpy().tobytes())
    return state.hexdigest()[:16]

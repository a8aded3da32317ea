"""What a call of the model returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.script.refusals import refused
from autopipe.trace.record.containers import attributes
from autopipe.trace.state.snapshots.places import slots


@dataclass(frozen=True)
class Output:
    """One output of the call."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool  # whether it needs a gradient
    name: str  # of its grad_fn
    device: torch.device


class Hidden:
    """Stands for an object with tensors that the call returned, in which they cannot be replaced by lazy ones."""

    def __init__(self, kind: str) -> None:
        self.__dict__["_kind"] = kind

    def _refuse(self, *args: Any) -> Any:
        raise refused(
            f"the {self.__dict__['_kind']} that the model returns has tensors, and no form that torch's pytree knows",
            "torch.utils._pytree.register_dataclass, or a tuple or dict",
        )

    __getattr__ = __setattr__ = __getitem__ = __iter__ = __len__ = __call__ = __eq__ = __reduce_ex__ = _refuse
    __hash__ = object.__hash__


def holds_tensors(value: Any, depth: int = 4) -> bool:
    """Return whether a value is a tensor, or a container or an object with one."""
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, (str, bytes, int, float, complex, type, nn.Module)):
        return False
    if isinstance(value, dict):
        return any(holds_tensors(entry, depth - 1) for entry in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(holds_tensors(entry, depth - 1) for entry in value)
    own = (*slots(value).values(), *(attributes(value) or {}).values())
    return any(holds_tensors(entry, depth - 1) for entry in own)


def shown(value: Any) -> Any:
    """Return a result of the call that is not a tensor for the script."""
    return Hidden(type(value).__qualname__) if holds_tensors(value) else value


def output_of(value: Tensor) -> Output:
    """Return the form of an output of the recording."""
    name = value.grad_fn.name() if value.grad_fn is not None else ""
    return Output(tuple(value.shape), tuple(value.stride()), value.dtype, value.requires_grad, name, value.device)

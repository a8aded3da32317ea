"""Memory that a build of the model allocates and never writes: ``nn.Parameter(torch.empty(n))`` without initializer.

Its values are arbitrary, so two builds with one seed differ, and some contain NaN. Here it is filled with zeros, which
new memory usually contains, so that every rank and plain training start from the same weights. No random number is
drawn for it, and initialized tensors do not change.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

_EMPTY = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.empty_permuted,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return (position, name) of the arguments that an operation writes."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


class ZeroedMemory(TorchDispatchMode):
    """Fills uninitialized memory that this thread allocates with zeros, within ``with``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        # references keep the addresses in use; a storage is released at its first write
        self._unwritten: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and record the memory that it allocates or writes."""
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in _EMPTY:
            if type(result) is torch.Tensor and result.layout is torch.strided and result.numel():
                if not result.is_meta:
                    result.zero_()
                storage = result.untyped_storage()
                self._unwritten[storage._cdata] = storage
            return result
        for position, name in _written(func):
            value = args[position] if position < len(args) else (kwargs or {}).get(name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                    self._unwritten.pop(tensor.untyped_storage()._cdata, None)
        return result

    def note(self, model: nn.Module) -> str:
        """Return a note that names the parameters and buffers that were never written, or ""; reset the record."""
        names = [
            name
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if type(tensor) in (torch.Tensor, nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.untyped_storage()._cdata in self._unwritten
        ]
        self._unwritten.clear()
        if not names:
            return ""
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return (
            f"{names[0]}{others}: never initialized by the model: it starts from zeros here, and from whatever memory "
            "holds in a plain script; initialize it in build_model, or load weights"
        )

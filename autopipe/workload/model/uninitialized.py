"""Memory that a build of the model takes and never writes, as ``nn.Parameter(torch.empty(n))`` without an initialiser.

Its values are whatever lay there before, so two builds with one seed differ, and some hold NaN. Here it is filled with
zeros, which is what new memory holds as a rule, so that every rank, and plain training beside them, starts from the
same weights. No number is drawn for it, and what is initialised stays as it is.
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
    """Return (place, name) of the arguments that an operation writes."""
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


class ZeroedMemory(TorchDispatchMode):
    """Within ``with``, memory of this thread that is taken uninitialised holds zeros."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation for it
        # held, so that no other tensor gets the same address; those that are written are let go at once
        self._unwritten: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and note what memory it takes or writes."""
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in _EMPTY:
            if type(result) is torch.Tensor and result.layout is torch.strided and result.numel():
                if not result.is_meta:
                    result.zero_()
                storage = result.untyped_storage()
                self._unwritten[storage._cdata] = storage
            return result
        for place, name in _written(func):
            value = args[place] if place < len(args) else (kwargs or {}).get(name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                    self._unwritten.pop(tensor.untyped_storage()._cdata, None)
        return result

    def note(self, model: nn.Module) -> str:
        """Name the parameters and buffers that were never written, "" where there are none; forget what was noted."""
        named = [
            name
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if type(tensor) in (torch.Tensor, nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.untyped_storage()._cdata in self._unwritten
        ]
        self._unwritten.clear()
        if not named:
            return ""
        others = f" and {len(named) - 1} more" if len(named) > 1 else ""
        return (
            f"{named[0]}{others}: never initialized by the model: it starts from zeros here, and from whatever memory "
            "holds in a plain script; initialize it in build_model, or load weights"
        )

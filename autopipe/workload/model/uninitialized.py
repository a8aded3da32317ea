"""Memory that a build of the model allocates and never writes: ``nn.Parameter(torch.empty(n))`` without initializer.

Its values are arbitrary, so two builds with one seed differ, and some contain NaN. Here it is filled with zeros, which
new memory usually contains, so that every rank and plain training start from the same weights. No random number is
drawn for it, and initialized tensors do not change.
"""

from __future__ import annotations

import functools
import mmap
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_EMPTY = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.empty_permuted,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}

PAGES_FROM = 1 << 20  # bytes; smaller tensors are written, because a process may have only so many mappings


@functools.cache
def written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return (position, name) of the arguments that an operation writes."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


class ZeroedMemory(TorchDispatchMode):
    """Fills uninitialized memory that this thread allocates with zeros, within ``with``.

    ``untouched``: use memory that the system provides with zeros at its first use. A tensor that is dropped before it
    is written, such as a parameter in a build without memory for the parameters, then takes no memory and no time.
    """

    def __init__(self, *, untouched: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._untouched = untouched
        # weak references: the memory of a dropped tensor is freed, and the key is not used again
        self._unwritten: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and record the memory that it allocates or writes."""
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in _EMPTY:
            if type(result) is torch.Tensor and result.layout is torch.strided and result.numel():
                if self._untouched and result.device.type == "cpu" and result.nbytes >= PAGES_FROM:
                    place_in_new_pages(result)
                elif not result.is_meta:
                    result.zero_()
                storage = result.untyped_storage()
                self._unwritten[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            return result
        for position, name in written(func):
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


def place_in_new_pages(tensor: torch.Tensor) -> None:
    """Give a new tensor memory that was never written, which contains zeros."""
    pages = mmap.mmap(-1, tensor.untyped_storage().nbytes(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
    tensor.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

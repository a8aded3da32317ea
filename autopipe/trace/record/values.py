"""Tables of torch calls: which are not recorded, which read data, which draw; and helpers for tensors in arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe.draws import is_random
from autopipe.ir.batch import ORDER, STRIDES

NEVER_RECORDED = {"size", "dim", "__len__", "stride", "_set_grad_enabled", "numel", "is_floating_point", "__hash__"}
READS_LAYOUT = {"is_contiguous": ORDER, "dim_order": ORDER, "stride": STRIDES, "storage_offset": STRIDES}
PLAIN_PROPERTIES = {"shape", "dtype", "device", "requires_grad", "is_cuda", "ndim", "layout", "grad_fn", "is_leaf"}
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
SILENT = {"batch_norm", "instance_norm"}
OF_ITSELF: dict[str, Callable[[Any], Any]] = {
    "__bool__": bool, "is_nonzero": bool, "__int__": int, "__float__": float, "__index__": int,
    "tolist": lambda value: value, "__format__": lambda value: value,
}  # fmt: skip
ANSWERED = {*OF_ITSELF, "equal", "allclose", "__contains__"}
REFUSED = {
    "backward": ("backward() inside the forward", "let the trainer run the backward of the loss"),
    "register_hook": (
        "a tensor hook (register_hook) in the forward",
        "change the gradient in a torch.autograd.Function",
    ),
    "register_post_accumulate_grad_hook": ("a gradient hook in the forward", "register it once, outside of forward"),
}


def is_answered(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether a call reads numbers in a way that a real batch can answer.

    Text of an integer may name a layer (``f"expert_{index}"``); text of any other number is only printed.
    """
    if name not in ANSWERED or not args or not isinstance(args[0], FakeTensor):
        return False
    return name != "__format__" or (args[0].dim() == 0 and not args[0].is_floating_point())


class RandomCount(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__ has no annotation
    """Counts the random ATen operations of the forward, as ``autopipe.draws.Draws`` does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor has its __init__
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += is_random(func, args, kwargs)
        return func(*args, **(kwargs or {}))


def effective_autocast(regions: Iterable[tuple[str, torch.dtype, bool, bool]]) -> tuple[Any, ...]:
    """Return the innermost region of each device, unless it disables autocast that is not enabled."""
    names: dict[str, Any] = {}
    for region in regions:
        device, _, enabled, _ = region
        if enabled or device in names:
            names[device] = region
    return tuple(region for region in names.values() if region[2])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists, dicts and slices."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for a tensor created in inference mode."""
    try:
        return tensor._version
    except RuntimeError:  # created in inference mode; testing each tensor first would double the cost
        return 0


def storage_key(value: Any) -> int | None:
    """Return a key that identifies the memory of a value, or None if it has none."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    return int(value.untyped_storage()._cdata)

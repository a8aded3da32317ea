"""What of torch is replaced so that models and batches move to a GPU only where their values are used."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopipe.script.devices import CPU, DEVICE, place_of
from autopipe.script.state import parked, remote
from autopipe.script.state.parked import (
    ParkedParameter,
    ParkedTensor,
    device_of_storage,
    is_parked,
    plain_of,
    storage_uses,
)
from autopipe.script.state.remote import RemoteBuffer, RemoteParameter
from autopipe.trace.record.fakes import fake_like
from autopipe.trace.record.targets import property_name

_TAGGER = 5
"""Before those of torch, which ask the memory."""


def install() -> None:
    """Replace how modules convert their tensors, and what files say of a tensor's device."""
    apply: Any = nn.Module._apply
    recurrent: Any = nn.RNNBase
    flatten = recurrent.flatten_parameters

    @functools.wraps(apply)
    def applied(module: nn.Module, fn: Any, recurse: bool = True) -> Any:
        if isinstance(fn, _Converting) or not _can_defer():
            return apply(module, fn, recurse)
        return apply(module, _Converting(fn), recurse)

    @functools.wraps(flatten)
    def flattened(module: Any) -> None:
        if not any(is_parked(weight) for weight in module._flat_weights):
            flatten(module)

    nn.Module._apply = applied  # type: ignore[method-assign]
    recurrent.flatten_parameters = flattened
    torch.serialization.register_package(_TAGGER, device_of_storage, lambda storage, location: None)


def defer_moves() -> None:
    """Replace how tensors of the script move to a GPU, from the start of the ranks on."""
    for name in ("to", "cuda"):
        setattr(Tensor, name, _deferring(getattr(Tensor, name)))


def _can_defer() -> bool:
    future: Any = torch.__future__
    replaced = future.get_overwrite_module_params_on_conversion() or future.get_swap_module_params_on_conversion()
    return torch.cuda.is_available() and not replaced


def _deferring(move: Any) -> Any:
    """Return a function that moves a batch of the script to the GPU when something other than the model uses it."""

    @functools.wraps(move)
    def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_own = remote.busy() or not torch._C._is_torch_function_enabled()  # autopipe's own use
        if type(tensor) is not Tensor or remote.controller is None or is_own:
            return move(tensor, *args, **kwargs)
        device: torch.device = remote.controller.device
        plain = tensor.layout is torch.strided and not (tensor.requires_grad or tensor.is_quantized)
        plain = plain and torch.is_grad_enabled()  # else perhaps inside of a function of autograd, which may return it
        if device == CPU or not plain or tensor.device != CPU or tensor.is_inference():
            return move(tensor, *args, **kwargs)
        result = move(fake_like(tensor), *args, **kwargs)
        if result.device != device or result.dtype != tensor.dtype:
            return move(tensor, *args, **kwargs)
        host = torch.empty_strided(
            result.size(), result.stride(), dtype=tensor.dtype, device=CPU, pin_memory=tensor.is_pinned()
        )
        return parked.parked_value(host.copy_(tensor), device)

    return moved


class _Calls(TorchFunctionMode):
    """Notes the names of the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.names.add(property_name(func) if name == "__get__" else name)
        return func(*args, **(kwargs or {}))


_CONVERSIONS = {
    "to", "cuda", "cpu", "type", "float", "double", "half", "bfloat16", "is_floating_point", "is_complex", "dim",
    "dtype", "device", "is_meta", "contiguous",
}  # fmt: skip
_EMPTY = {"empty_like"}


class _Converting:
    """The function of one ``Module._apply``: a tensor that would move to the GPU is parked, the same object."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __call__(self, tensor: Any) -> Any:
        """Return the tensor, another one for a buffer, or what the function returns."""
        kinds = (Tensor, nn.Parameter, ParkedTensor, ParkedParameter, RemoteParameter, RemoteBuffer)
        if type(tensor) not in kinds or tensor.layout is not torch.strided or tensor.is_quantized:
            return self.fn(tensor)
        if tensor.device.type not in (CPU.type, "meta") and not is_parked(tensor):
            return self.fn(tensor)
        fake, calls = fake_like(tensor), _Calls()
        with calls:
            result = self.fn(fake)
        if result is fake:
            return tensor
        if not isinstance(result, Tensor) or result.shape != tensor.shape:
            return self.fn(tensor)
        empty = calls.names == _EMPTY
        if isinstance(tensor, RemoteBuffer) and result.device == CPU:
            tensor.data = self.fn(tensor)
            return tensor
        if place_of(result.device, _gpu()) != DEVICE or not (empty or calls.names <= _CONVERSIONS):
            return self.fn(tensor)
        if tensor.is_meta and not empty:
            return self.fn(tensor)
        return _parked(tensor, result, empty=empty)


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _parked(tensor: Tensor, result: Tensor, *, empty: bool) -> Tensor:
    """Return a tensor in the form of ``result`` whose memory stays on the host."""
    form: dict[str, Any] = {"dtype": result.dtype, "device": CPU}
    if empty:
        host = torch.empty_strided(result.size(), result.stride(), **form)
    else:
        host = plain_of(tensor)
        is_whole = host.untyped_storage().nbytes() == host.numel() * host.itemsize
        same = (host.dtype, host.stride()) == (result.dtype, result.stride())
        if not (same and is_whole and not is_parked(tensor) and storage_uses(tensor) == 2):  # with ``host``
            host = torch.empty_strided(result.size(), result.stride(), **form).copy_(host)
    if isinstance(tensor, (nn.Parameter, RemoteBuffer)) and not tensor.is_meta:
        parked.park(tensor, host, result.device)
        return tensor
    value = host.detach()
    parked.park(value, host, result.device)
    return value

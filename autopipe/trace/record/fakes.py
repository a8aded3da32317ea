"""The fake of a real tensor: ``FakeTensorMode.from_tensor``, and a fast path for ordinary parameters and buffers.

A model has hundreds of parameters, and a capture records it up to four times. ``from_tensor`` examines each for views,
subclasses and functorch wrappers, which takes several times as long as creating the fake.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

PARKED = "autopipe_parked"
"""An attribute of a tensor whose memory is on the host and stands for memory on a GPU, which it has as ``device``."""


def fake_of(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Return the fake of a tensor, of the same static shape. Fakes of tensors that share memory share memory.

    Call it outside of ``mode``.
    """
    if PARKED in vars(tensor):
        with mode, torch._C.DisableTorchFunctionSubclass():
            device = vars(tensor)[PARKED].device
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        fake.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            fake._is_param = True
        return fake
    if not _ordinary(tensor):
        return mode.from_tensor(tensor, static_shapes=True)
    converter = mode.fake_tensor_converter
    memory = converter.meta_converter.describer.describe_storage(tensor.untyped_storage())
    if converter.meta_converter.get_storage_memo(memory) is not None:
        return mode.from_tensor(tensor, static_shapes=True)
    meta = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
    )
    fake = FakeTensor(mode, meta, tensor.device)
    if isinstance(tensor, nn.Parameter):
        fake._is_param = True  # isinstance(fake, nn.Parameter) reads it
    # ``from_tensor`` returns this fake for the tensor, and gives its memory to the fakes of views
    converter.set_tensor_memo(tensor, fake)
    converter.meta_converter.set_storage_memo(memory, fake.untyped_storage())
    return fake


def _ordinary(tensor: Tensor) -> bool:
    """Return whether a tensor is a leaf that fills its own memory, without a property that ``from_tensor`` copies."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.is_leaf
        and not tensor._is_view()
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not torch._is_functional_tensor(tensor)
        and tensor.grad is None
        and getattr(tensor, "grad_dtype", tensor.dtype) in (None, tensor.dtype)
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    )


def in_fake_mode() -> bool:
    """Return whether functions run on fake tensors, which stand for real ones and share no memory with them."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def fake_like(tensor: Tensor) -> Tensor:
    """Return a tensor without memory of the same form, on the device that a tensor is on or says."""
    device = vars(tensor)[PARKED].device if PARKED in vars(tensor) else tensor.device
    with torch._C.DisableTorchFunctionSubclass(), FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)

"""Count the operations that make the host wait for a GPU, over fake CUDA tensors."""

from __future__ import annotations

import contextlib
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from support.fake_gpu import allow_cuda

READS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2", "item"}


class Synchronizations(TorchDispatchMode):
    """Counts, by name. Tensors on the GPU are fake, those of the host are real; what is read becomes ones."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []  # an id is valid while its tensor lives
        self.counts: Counter[str] = Counter()
        self.locked: set[int] = set()  # tensors in page-locked memory

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        first = next((a for a in args if isinstance(a, torch.Tensor)), None)
        if name in ("stack", "cat") and len({leaf.device for leaf in args[0]}) > 1:
            raise RuntimeError("Expected all tensors to be on the same device")  # fake tensors allow numbers
        if name in READS and first is not None and first.device.type == "cuda":
            self.counts[name] += 1
            return 1.0
        if name == "_to_copy" and first is not None:
            source, target = first.device.type, torch.device(kwargs.get("device") or first.device).type
            if (source, target) == ("cuda", "cpu"):
                self.counts["to host"] += 1
                with _disable_current_modes():
                    return torch.ones(first.shape, dtype=kwargs.get("dtype") or first.dtype)
            if (source, target) == ("cpu", "cuda") and not (kwargs.get("non_blocking") and id(first) in self.locked):
                self.counts["from pageable memory"] += 1
        if name == "copy_":
            target, source = args[0].device.type, args[1].device.type
            if target != source and not (source == "cpu" and args[1].dim() == 0):  # a number becomes an argument
                self.counts["copy_"] += 1
                return args[0]
        on_gpu = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"
        if not on_gpu and not any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            with _disable_current_modes():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def counted() -> Iterator[Synchronizations]:
    """Count. Tensors on the GPU are fake; streams and page-locked memory are stand-ins."""
    allow_cuda()
    mode = Synchronizations()

    def pin(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        with _disable_current_modes():  # torch keeps the strides
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
        mode.locked.add(id(tensor))
        mode.kept.append(tensor)
        return tensor

    def synchronize() -> None:
        mode.counts["synchronize"] += 1

    stream = types.SimpleNamespace(wait_stream=lambda other: None, synchronize=synchronize)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", pin)
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor, device=None: id(tensor) in mode.locked)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(torch.cuda, "Stream", lambda device=None: stream)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        with FakeTensorMode(allow_non_fake_inputs=True), mode:
            yield mode

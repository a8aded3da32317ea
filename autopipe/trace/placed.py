"""Run a model and its graph on the device that will train, although both are recorded on the CPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopipe.errors import TraceError
from autopipe.trace.graph.replay import CPU
from autopipe.trace.result import Capture
from autopipe.workload import Item, Workload
from autopipe.workload.model.placeholders import is_placeholder

_OPERATIONS = ("matmul", "conv", "rnn")
"""Whose ``fp32_precision`` a GPU has."""
_COPIES = 4
used: set[torch.device] = set()
"""The devices to which this process has moved a model."""


@dataclass(frozen=True, slots=True)
class Place:
    """The device on which real numbers of a model are computed. Otherwise its tensors are on the CPU."""

    device: torch.device = CPU

    @property
    def is_cpu(self) -> bool:
        """Return whether nothing is moved."""
        return self.device.type == CPU.type

    @contextlib.contextmanager
    def having(self, workload: Workload, model: nn.Module, capture: Capture) -> Iterator[Workload]:
        """Move a model, its loss and its capture to the device within the block.

        Yields the workload, whose batches are there.
        All tensors stay the same objects; they have no gradients at the beginning, and those of before at the end.
        """
        if self.is_cpu:
            yield workload
            return
        functions = workload.functions().values() if hasattr(workload, "functions") else ()
        roots = [model, capture.module, *(hook for hook in functions if isinstance(hook, nn.Module))]
        if capture.divisor is not None:
            roots.append(capture.divisor.module)
        tensors = {id(tensor): tensor for root in roots for tensor in _tensors_of(root)}.values()
        _refuse_shared_memory(model)
        used.add(self.device)
        before = [(tensor, tensor.data, tensor.grad if tensor.is_leaf else None) for tensor in tensors]
        try:
            for tensor, data, gradient in before:
                if gradient is not None:
                    tensor.grad = None
                tensor.data = data.to(self.device)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "RNN module weights", UserWarning)  # they are no longer one memory
                yield cast(Workload, _PlacedWorkload(workload, self.device))
            torch.cuda.synchronize(self.device)  # raises what a kernel reports late
        finally:
            for tensor, data, gradient in before:
                if tensor.is_leaf:
                    tensor.grad = None
                tensor.data = data
                if gradient is not None:
                    tensor.grad = gradient

    @contextlib.contextmanager
    def in_float32(self) -> Iterator[None]:
        """Multiply float32 in float32 within the block: TF32 rounds more than a batch and its parts may differ."""
        before = [] if self.is_cpu else [torch._C._get_fp32_precision_getter("cuda", name) for name in _OPERATIONS]
        try:
            for name, _ in zip(_OPERATIONS, before, strict=False):
                torch._C._set_fp32_precision_setter("cuda", name, "ieee")
            yield
        finally:
            for name, precision in zip(_OPERATIONS, before, strict=False):
                torch._C._set_fp32_precision_setter("cuda", name, precision)

    def or_cpu(self, model: nn.Module) -> Place:
        """Return the CPU if the device has no room for the weights, moved ones, and two gradients."""
        if self.is_cpu:
            return self
        needed = _COPIES * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        return self if needed <= torch.cuda.mem_get_info(self.device)[0] else Place()

    def item(self, workload: Workload, item: Item) -> Item:
        """Return a batch with its tensors on the device."""
        if self.is_cpu:
            return item
        leaves = {name: leaf.to(self.device) for name, leaf in workload.leaves(item).items()}
        return workload.with_leaves(item, leaves)


ON_CPU = Place()


class _PlacedWorkload:
    """A workload whose example batches are on a device."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._workload, self._place = workload, Place(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def example_item(self, batch_size: int | None = None) -> Item:
        """Return a batch on the device."""
        return self._place.item(self._workload, self._workload.example_item(batch_size))


def _refuse_shared_memory(model: nn.Module) -> None:
    """Raise an error if two tensors of a model share memory, which they would not after they are moved."""
    owners: dict[int, Tensor] = {}
    for tensor in _tensors_of(model):
        if tensor.layout != torch.strided or not tensor.numel() or is_placeholder(tensor):
            continue
        if owners.setdefault(tensor.untyped_storage().data_ptr(), tensor) is not tensor:
            raise TraceError("two tensors of the model share memory, and would not on another device")


def _tensors_of(root: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a module, and the tensors in its attributes."""
    for module in root.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, Tensor):
                yield value

"""A snapshot of the Python state of a model: the attributes of its modules, and the generators outside torch."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autopipe.draws import random_states, set_random_states
from autopipe.trace.record.containers import CONTAINERS, copied, refill

PYTHONS, NUMPYS = "Python's random", "numpy.random"  # generators that are not torch's
REGISTRIES = ("_parameters", "_buffers", "_modules")
_ABSENT = object()


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[BufferSnapshot]:
    """Restore a model after the block: attributes, gradients and buffers, and the random generators of the CPU.

    Weights are not copied: a caller that changes one restores it. Yields the buffers before the block.
    """
    snapshot = ModelSnapshot(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    with buffers_restored(model) as buffers:
        try:
            yield buffers
        finally:
            snapshot.restore()
            for parameter, gradient in gradients:
                parameter.grad = gradient


@contextlib.contextmanager
def buffers_restored(model: nn.Module) -> Iterator[BufferSnapshot]:
    """Restore only the buffers after the block. Yields them as they were before it."""
    buffers = BufferSnapshot(model.modules())
    try:
        yield buffers
    finally:
        buffers.restore()


class BufferSnapshot:
    """The buffers of modules: the tensors that are registered, and their values."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._registries = [(module._buffers, dict(module._buffers)) for module in modules]
        tensors = {id(buffer): buffer for _, registry in self._registries for buffer in registry.values()}
        self._values = [
            (buffer, buffer.detach().clone())
            for buffer in tensors.values()
            if buffer is not None and not _is_expanded(buffer)
        ]

    def restore(self) -> None:
        """Register the tensors again, if others were registered, and copy their values back."""
        for registry, tensors in self._registries:
            refill(registry, tensors)
        with torch.no_grad():
            for buffer, value in self._values:
                buffer.copy_(value)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements share their memory, so that no operation may write to the tensor."""
    return tensor.layout == torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


class ModelSnapshot:
    """The attributes of every module, with the content of containers and arrays, and the random states."""

    def __init__(self, model: nn.Module) -> None:
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []  # one level deep
        self._arrays: list[tuple[Any, Any]] = []
        for module in model.modules():
            attributes = vars(module)
            self._attributes.append((attributes, dict(attributes)))
            for value in attributes.values():
                if isinstance(value, CONTAINERS):
                    self._containers.append((value, copied(value)))
                elif isinstance(value, np.ndarray) and value.flags.writeable:
                    self._arrays.append((value, value.copy()))
        self._random = random_states()

    def random_drawn(self) -> str:
        """Return the name of the generator that was drawn from since the snapshot, Python's or numpy's, else ""."""
        if random.getstate() != self._random[2]:
            return PYTHONS
        return NUMPYS if self.numpy_drawn() else ""

    def numpy_drawn(self) -> bool:
        """Return whether numpy's generator was drawn from since the snapshot."""
        now: Any = np.random.get_state()
        before: Any = self._random[1]
        return now[2:] != before[2:] or not np.array_equal(now[1], before[1])

    def changed(self, model: nn.Module) -> Iterator[tuple[str, str, Any, Any]]:
        """Yield (path, attribute, value before, value now) of every plain attribute that was rebound."""
        for (path, module), (attributes, before) in zip(model.named_modules(), self._attributes, strict=False):
            if vars(module) is not attributes:
                continue
            for name, value in attributes.items():
                if name not in REGISTRIES and before.get(name, _ABSENT) is not value:
                    yield path, name, before.get(name), value

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the attributes for the duration of the block, and undo that at its end."""
        attributes = [(attributes, dict(attributes)) for attributes, _ in self._attributes]
        containers = [(container, copied(container)) for container, _ in self._containers]
        self._refill(self._containers, self._attributes)
        try:
            yield
        finally:
            self._refill(containers, attributes)

    def restore(self) -> None:
        """Restore everything, in the same dictionaries and lists."""
        self._refill(self._containers, self._attributes)
        for array, content in self._arrays:
            if array.shape == content.shape:
                array[...] = content
        set_random_states(self._random)

    @staticmethod
    def _refill(containers: list[tuple[Any, Any]], attributes: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        for container, contents in (*containers, *attributes):
            refill(container, contents)

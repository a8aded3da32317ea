"""Messages between CPU ranks: the values of one edge, each with its order in memory, in few transfers.

A transfer over gloo takes three writes to a socket and as many wakeups of a thread, whatever its size. So the small
values of a message, and the orders of all, travel together as a *head*, and each large value on its own. If a message
has one value, that is in the head, whatever its size::

    head    | value 0 | value 2 | flag | orders of values 0, 1, 2 |        the orders only if the flag is 1
    value 1 | elements, without gaps |

The orders are those of ``strides``: the next stage must read a value in the order in memory that it has here. If each
has the order of the plan, the flag is 0, and the orders are not sent. A single value in that order is sent
without a copy, and without the flag. Gloo accepts a message that is shorter than its receiver's buffer, and the
receiver has set the flag to 0 before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autopipe.strides import Layout, memory_order, packed, unpacked

SMALL_BYTES = 1 << 14
"""The largest value that is copied into the head of a message with several."""

_ALIGNMENT_BYTES = 64  # kernels may take another path, and round differently, at other alignments


@dataclass(frozen=True, slots=True)
class _Value:
    """A value of a message that has elements."""

    # its place among the values of the message
    index: int
    layout: Layout
    num_bytes: int
    # of its elements in the head; -1: a transfer of its own
    offset: int
    # of the order of the plan; None if that has gaps
    strides: tuple[int, ...] | None

    def order_of(self, tensor: torch.Tensor) -> Sequence[int]:
        """Return the order of a tensor in memory: the plan's own object if it is the same."""
        planned = self.layout.order
        if tensor.is_contiguous() if not planned else tensor.stride() == self.strides:
            return planned
        order = memory_order(tensor)
        return planned if tuple(order) == planned else order

    def elements(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the place of the elements in the head, as a vector."""
        return buffer[self.offset : self.offset + self.num_bytes].view(self.layout.dtype)


@dataclass(frozen=True, slots=True)
class HostMessage:
    """How a message with values of given layouts travels. Both ends derive it from the layouts."""

    # those that have elements
    values: tuple[_Value, ...]
    # the places and layouts of the others
    empty: tuple[tuple[int, Layout], ...]
    # in the head
    flag_at: int
    head_bytes: int
    # of the head and the transfers after it, at most
    num_bytes: int

    @property
    def alone(self) -> _Value | None:
        """The value, if it is the only one."""
        return self.values[0] if len(self.values) == 1 else None

    def packets(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors to transfer, in order: contiguous, and perhaps the values themselves."""
        if not self.values:
            return []
        orders = [value.order_of(tensors[value.index]) for value in self.values]
        as_planned = all(order is value.layout.order for value, order in zip(self.values, orders, strict=True))
        if as_planned and self.alone is not None:
            return [packed(tensors[self.alone.index], orders[0])]
        head = torch.empty(self.head_bytes, dtype=torch.uint8)
        large = []
        for value, order in zip(self.values, orders, strict=True):
            elements = packed(tensors[value.index], order)
            if value.offset < 0:
                large.append(elements)
            else:
                value.elements(head).copy_(elements.view(-1))
        if as_planned:
            head[self.flag_at] = 0
            return [head[: self.flag_at + 1], *large]
        trailer = [1]
        for value, order in zip(self.values, orders, strict=True):
            count = len(value.layout.shape)
            trailer += order or [*range(count), *[0] * count]
        head[self.flag_at :] = torch.tensor(trailer, dtype=torch.uint8)
        return [head, *large]

    def receive(self, start: Callable[[torch.Tensor], Any]) -> ArrivingMessage:
        """Post the receives of the transfers. ``start``: posts one into a buffer, and returns a work to wait for."""
        if not self.values:
            return ArrivingMessage(self, (), torch.empty(0), np.empty(0, np.uint8), {})
        head = torch.empty(self.head_bytes, dtype=torch.uint8)
        trailer = head.numpy()[self.flag_at :]
        trailer[0] = 0
        large = {v.index: torch.empty(v.layout.shape, dtype=v.layout.dtype) for v in self.values if v.offset < 0}
        works = [start(buffer) for buffer in (head, *large.values())]
        return ArrivingMessage(self, works, head, trailer, large)

    def unpack(self, head: torch.Tensor, trailer: Any, large: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the values by index, from the buffers of their transfers. ``trailer``: the head from the flag on."""
        arrived = {index: torch.empty(layout.shape, dtype=layout.dtype) for index, layout in self.empty}
        if not self.values:
            return arrived
        orders: list[int] = trailer[1:].tolist() if trailer[0] else []
        for value in self.values:
            layout, order = value.layout, value.layout.order
            if orders:
                order, orders = tuple(orders[: 2 * len(layout.shape)]), orders[2 * len(layout.shape) :]
            if value.offset < 0:
                arrived[value.index] = unpacked(large[value.index], layout.shape, order)
                continue
            # not a view of the head: a stage may change a value in place, and autograd counts that for all views
            elements = torch.empty(0, dtype=layout.dtype)
            start = value.offset // layout.dtype.itemsize
            if order is layout.order and value.strides is not None:
                arrived[value.index] = elements.set_(head.untyped_storage(), start, layout.shape, value.strides)
            else:
                elements.set_(head.untyped_storage(), start, (value.num_bytes // layout.dtype.itemsize,), (1,))
                arrived[value.index] = unpacked(elements, layout.shape, order)
        return arrived


class ArrivingMessage:
    """The posted receives of one message."""

    def __init__(
        self,
        message: HostMessage,
        works: Sequence[Any],
        head: torch.Tensor,
        trailer: Any,
        large: dict[int, torch.Tensor],
    ) -> None:
        self._message, self._works = message, works
        self._head, self._trailer, self._large = head, trailer, large
        self._arrived: dict[int, torch.Tensor] | None = None

    def take(self, index: int) -> torch.Tensor:
        """Wait for the message, and return a value. Each is taken once. Raises: RuntimeError of torch."""
        if self._arrived is None:
            for work in self._works:
                work.wait()
            self._arrived = self._message.unpack(self._head, self._trailer, self._large)
            del self._works, self._head, self._trailer, self._large
        return self._arrived.pop(index)


@functools.lru_cache(maxsize=4096)
def host_message(layouts: tuple[Layout, ...]) -> HostMessage:
    """Return how a message with values of these layouts travels."""
    values, empty, flag_at, trailer = [], [], 0, 1
    sizes = [math.prod(layout.shape) * layout.dtype.itemsize for layout in layouts]
    is_alone = sum(map(bool, sizes)) == 1
    for index, (layout, num_bytes) in enumerate(zip(layouts, sizes, strict=True)):
        if not num_bytes:
            empty.append((index, layout))
            continue
        offset = -1
        if is_alone or num_bytes <= SMALL_BYTES:
            offset = -(-flag_at // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            flag_at = offset + num_bytes
        values.append(_Value(index, layout, num_bytes, offset, _planned_strides(layout)))
        trailer += 2 * len(layout.shape)
    head_bytes = flag_at + trailer
    num_bytes = head_bytes + sum(value.num_bytes for value in values if value.offset < 0)
    return HostMessage(tuple(values), tuple(empty), flag_at, head_bytes, num_bytes)


def _planned_strides(layout: Layout) -> tuple[int, ...] | None:
    count = len(layout.shape)
    if any(layout.order[count:]):
        return None
    strides, step = [0] * count, 1
    for dimension in reversed(layout.order[:count] or range(count)):
        strides[dimension] = step
        step *= layout.shape[dimension]
    return tuple(strides)

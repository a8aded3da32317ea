"""The exchange between the replicas of a stage: the sum of their gradients, and the mean of their running statistics.

Gradients are summed in buckets, which start while the last backward of a minibatch still runs.

::

    backward of the last microbatch |  layer 9   layer 8   layer 7  ...  layer 0 |
    bucket 0 (layers 9, 8)                               |-- sum ---|
    bucket 1 (layers 7, 6)                                           |-- sum ---|            S waits here
    bucket 2 (the rest)                                                          |-- sum ---|

Parameters fill buckets in the reverse order of their use in the forward, which is about the order in which backward
finishes with them. A bucket starts when all its gradients have arrived and the previous bucket has started, so every
replica starts the same sums in the same order. The place of a number in the buckets never changes, and so neither does
the order in which the numbers of the replicas are added: a run is reproducible.

A replica without a gradient for a parameter (it had no microbatch, or did not use the parameter) adds zeros. Each
bucket therefore ends with one number per parameter: how many replicas have a gradient. If it is 0, ``grad`` stays None.

Source: PyTorch DDP, arXiv:2006.15704, section 3.2 (bucketing, and the order).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from autopipe.ir.messages import BUCKET_BYTES
from autopipe.runtime.transport.base import Pending, Transport

# kernels may take another path, and round differently, at other alignments
_ALIGNMENT_BYTES = 64


@dataclass(slots=True)
class Bucket:
    """Parameters whose gradients, or new values, are exchanged in one message."""

    names: list[str] = field(default_factory=list)
    # the offset of each parameter
    places: dict[str, int] = field(default_factory=dict)
    # in elements; for gradients, with the counts of replicas at the end
    size: int = 0
    # parameters whose gradient the running backward has not computed yet
    missing: set[str] = field(default_factory=set)
    # parameters without a gradient on this rank
    absent: set[str] = field(default_factory=set)
    pending: Pending | None = None


class GradientSum:
    """Sums the gradients of one stage over its replicas.

    ``parameters`` are the trained masters, by name; their shapes decide the buckets. ``order`` lists names in the order
    in which the forward uses them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        order: Sequence[str],
        group: Sequence[int],
        transport: Transport,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.group, self.transport = tuple(group), transport
        self.parameters = dict(parameters)
        place = {name: index for index, name in enumerate(order)}
        names = sorted(self.parameters, key=lambda name: place.get(name, -1), reverse=True)
        self.buckets = filled(self.parameters, names, bucket_bytes)
        for bucket in self.buckets:
            bucket.size += len(bucket.names)
        self._of = {name: bucket for bucket in self.buckets for name in bucket.names}
        self._next = 0

    @property
    def busy(self) -> bool:
        """Whether a sum has started and not been waited for."""
        return self._next > 0

    @contextlib.contextmanager
    def watching(self, leaves: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Start each bucket when its gradients arrive in the backward of the body, the last of its minibatch.

        ``leaves`` are the parameters that the backward accumulates into, by name. If one gets no gradient, its bucket
        and the following ones wait for ``start``.
        """
        hooks = []
        for bucket in self.buckets:
            bucket.missing = set(bucket.names)
        for name in self._of:
            note = self._noting(name, leaves)
            hooks.append(leaves[name].register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _noting(self, name: str, leaves: Mapping[str, nn.Parameter]) -> Callable[[torch.Tensor], None]:
        def note(leaf: torch.Tensor) -> None:
            self._of[name].missing.discard(name)
            while self._next < len(self.buckets) and not self.buckets[self._next].missing:
                self._start_next(leaves)

        return note

    def start(self, leaves: Mapping[str, nn.Parameter]) -> None:
        """Start the remaining buckets: every gradient of the minibatch has arrived, or never will."""
        while self._next < len(self.buckets):
            self._start_next(leaves)

    def _start_next(self, leaves: Mapping[str, nn.Parameter]) -> None:
        bucket = self.buckets[self._next]
        first = leaves[bucket.names[0]]
        flat = torch.zeros(bucket.size, dtype=first.dtype, device=first.device)
        bucket.absent = {name for name in bucket.names if leaves[name].grad is None}
        for name, place in bucket.places.items():
            leaf = leaves[name]
            if leaf.grad is not None:
                flat[place : place + leaf.numel()].view_as(leaf).copy_(leaf.grad)
                leaf.grad = None  # free it: its numbers are in the bucket
        flat[-len(bucket.names) :] = 1.0
        for index, name in enumerate(bucket.names):
            if name in bucket.absent:
                flat[bucket.size - len(bucket.names) + index] = 0.0  # a fill: no copy from the host
        bucket.pending = self.transport.start_all_reduce(self.group, flat)
        self._next += 1

    def finish(self) -> None:
        """Wait for all buckets and set the ``grad`` of every parameter to its sum."""
        for bucket in self.buckets:
            if bucket.pending is None:
                continue
            flat, bucket.pending = bucket.pending.wait(), None
            # no synchronization with the device if this rank has all gradients
            counts = flat[-len(bucket.names) :].tolist() if bucket.absent else [1.0] * len(bucket.names)
            for name, count in zip(bucket.names, counts, strict=True):
                parameter, place = self.parameters[name], bucket.places[name]
                part = flat[place : place + parameter.numel()].view_as(parameter)
                parameter.grad = part if count else None
        self._next = 0


def filled(
    parameters: Mapping[str, nn.Parameter], names: Sequence[str], bucket_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """Return buckets of one dtype and device each, no larger than ``bucket_bytes`` unless one parameter is."""
    buckets: list[Bucket] = []
    open_: dict[tuple[torch.dtype, torch.device], Bucket] = {}
    for name in names:
        parameter = parameters[name]
        kind = parameter.dtype, parameter.device
        step = max(_ALIGNMENT_BYTES // parameter.element_size(), 1)
        needed = -(-parameter.numel() // step) * step
        bucket = open_.get(kind)
        if bucket is None or (bucket.size + needed) * parameter.element_size() > bucket_bytes:
            bucket = open_[kind] = Bucket()
            buckets.append(bucket)
        bucket.names.append(name)
        bucket.places[name] = bucket.size
        bucket.size += needed
    return buckets


class BufferMean:
    """Gives all replicas of a stage the mean of the running statistics that its forwards write, without batch counters.

    ``written`` names the buffers that a node of the stage writes; all others are equal already. ``first``: other name
    -> first name of a buffer with several names.
    """

    def __init__(
        self, stage: nn.Module, written: Iterable[str], first: Mapping[str, str], group: Sequence[int]
    ) -> None:
        self.group = tuple(group)
        names = frozenset(written)
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        for path, module in stage.named_modules(remove_duplicate=False):
            for key, buffer in module._buffers.items():
                full = f"{path}.{key}" if path else key
                name = first.get(full, full)
                if name in names and buffer is not None and buffer.is_floating_point():
                    self._places.setdefault(name, []).append((module, key))

    @torch.no_grad()
    def average(self, transport: Transport) -> None:
        """Replace the buffers by their mean. New tensors: autograd may have saved the old ones for later backwards."""
        kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = {}
        for name, ((module, key), *_) in self._places.items():
            buffer = module._buffers[key]
            if buffer is not None:
                kinds.setdefault((buffer.dtype, buffer.device), []).append((name, buffer))
        for buffers in kinds.values():
            flat = torch.cat([buffer.reshape(-1) for _, buffer in buffers])
            transport.all_reduce(self.group, flat)
            flat.div_(len(self.group))
            offset = 0
            for name, buffer in buffers:
                own = flat[offset : offset + buffer.numel()].view_as(buffer).clone()
                offset += buffer.numel()
                for module, key in self._places[name]:
                    module._buffers[key] = own

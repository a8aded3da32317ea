"""The tensors of a microbatch on the device of a rank. To a GPU, each is copied when a stage first reads it.

So a rank copies only what its own stages read of the microbatches that it runs, and a window of minibatches takes no
device memory. The copies run on a stream of their own, from page-locked memory: the host does not wait for them, and
they overlap with the kernels that are queued already. Only for memory that the user's data has locked itself does the
host wait, for the transfer alone: the next minibatch may overwrite it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from autopipe.ir.graph import Input


class Copies:
    """Copies tensors of the host to one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch

    def copy(self, leaf: torch.Tensor) -> torch.Tensor:
        """Start to copy a tensor. Kernels that are queued from now on wait for the copy."""
        if leaf.is_cuda or leaf.layout != torch.strided:  # the user's data is on a GPU, or cannot be locked
            return leaf.to(self._device, non_blocking=True)
        users = leaf.is_pinned()
        locked = leaf if users else _dense(leaf).pin_memory()
        with torch.cuda.stream(self._stream):
            moved = locked.to(self._device, non_blocking=not users)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        moved.record_stream(current)  # its memory belongs to the other stream
        return moved


def _dense(leaf: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy without gaps and shared elements, with the strides that it has on another device.

    ``pin_memory`` keeps the strides. It rejects an expanded tensor, and the host waits for a copy if there are gaps.
    """
    dense = torch.empty_like(leaf, device="meta").stride() == leaf.stride()
    return leaf if dense else leaf.to("cpu", copy=True)


class LeavesOnGpu(Mapping[str, torch.Tensor]):
    """The tensors of a microbatch, by name, each copied when it is read. ``host``: as they were read.

    ``numbers``: those whose value the stage code reads, which stay on the host, so that it need not wait for the GPU.
    """

    def __init__(self, host: Mapping[str, torch.Tensor], copies: Copies, numbers: frozenset[str]) -> None:
        self.host, self._copies, self._numbers = host, copies, numbers

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a copy on the GPU; a number as it is."""
        leaf = self.host[name]
        return leaf if name in self._numbers else self._copies.copy(leaf)

    def __contains__(self, name: object) -> bool:
        """Return whether there is a tensor of this name, without a copy."""
        return name in self.host

    def __iter__(self) -> Iterator[str]:
        """Iterate the names."""
        return iter(self.host)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.host)


class Placement:
    """Gives a rank the tensors of its microbatches on its device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = Copies(device) if device.type == "cuda" else None

    def of(self, leaves: Mapping[str, torch.Tensor], numbers: Iterable[Input] = ()) -> Mapping[str, torch.Tensor]:
        """Return the tensors on the device, but for ``numbers``. On a CPU, they are the same tensors."""
        if self._copies is not None:
            return LeavesOnGpu(leaves, self._copies, frozenset(entry.name for entry in numbers))
        return {name: leaf.to(self._device) for name, leaf in leaves.items()}


def on_host(leaves: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a microbatch as they were read."""
    return leaves.host if isinstance(leaves, LeavesOnGpu) else leaves

"""Checksums of tensors: equal for two tensors only if they have the same bits. 5 GB/s on one core."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from autopipe import sparse
from autopipe.bits import bytes_of
from autopipe.runtime.checkpoint.host_buffer import queued_on_gpu


def bits(tensor: torch.Tensor) -> int:
    """Return a checksum of a tensor: the sum of its mixed 64-bit words, each times an odd number given by its place."""
    return int(_sum(tensor))


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the ``bits`` of every tensor, of a sparse one those of each part. Each device is read once."""
    return Sums(tensors).finish()


class Sums:
    """The ``checksums`` of some tensors, which a GPU computes in the order of its stream while the host continues."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, tensor in sparse.encoded(tensors).items():
            by_device.setdefault(tensor.device, {})[name] = _sum(tensor)
        self._sums = [(list(sums), torch.stack(list(sums.values()))) for sums in by_device.values()]
        self._queued = queued_on_gpu(tensors.values())

    def finish(self) -> dict[str, int]:
        """Return them, in any thread. Waits for a GPU."""
        if self._queued is not None:
            self._queued.synchronize()
        return {name: number for names, sums in self._sums for name, number in zip(names, sums.tolist(), strict=True)}


_CHUNK = 1 << 18  # words that are multiplied at once


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    data = bytes_of(tensor)
    end = data.numel() // 8 * 8
    words = data[:end]
    if words.storage_offset() % 8:
        words = words.clone()  # torch views only aligned memory as 64-bit words
    rest = torch.nn.functional.pad(data[end:], (0, end + 8 - data.numel())).view(torch.int64)
    total, factors = torch.zeros((), dtype=torch.int64, device=data.device), _factors(data.device)
    for number, chunk in enumerate([rest, *torch.split(words.view(torch.int64), _CHUNK)]):
        # a factor moves the highest bit, a sign, nowhere; no multiple of 16, so that the signs of a word do not cancel
        mixed = _shifted(chunk, 29).bitwise_xor_(chunk).mul_(factors[: chunk.numel()])
        total = total + mixed.sum() * (2 * number + 1)
    return total


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Return words shifted to the right, with zeros in front."""
    return (words >> by).bitwise_and_((1 << (64 - by)) - 1)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return the factors of the words of a chunk: odd, so that no bit of a word is lost, and without a pattern."""
    factors = torch.arange(1, _CHUNK + 1, device=device)
    for odd in (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9):
        factors = factors * odd
        factors ^= _shifted(factors, 31)
    return factors | 1

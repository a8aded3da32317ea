"""Parameters without memory of their own: they share pages, so that a model of any size takes the memory of a few.

A parameter that a rank does not need, or that the command cannot hold, is a placeholder: it has its shape and dtype,
operations run on it, and what is written to one is written to others. ``randomize_placeholders`` gives them random
numbers, so that a model can be run and compared with its graph.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor, nn

_MARK = "_is_placeholder_of_autopipe"
_ALIGNED = 64  # bytes between the beginnings of two placeholders, which are at different addresses
_NEAR = 0.1  # spread of the scales of normalization layers around 1, and of biases around 0


class SharedPages:
    """Pages that any number of tensors use at the same time. A page takes memory once it is written."""

    def __init__(self, num_bytes: int = mmap.PAGESIZE) -> None:
        self._pages = new_pages(num_bytes)
        self._num_tensors = 0

    def tensor_like(self, tensor: Tensor) -> Tensor:
        """Return a strided tensor of the same form. Its storage begins at an address of its own."""
        num_bytes, first = _extent(tensor), self._num_tensors * _ALIGNED
        self._num_tensors += 1
        if not num_bytes:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if first + num_bytes > len(self._pages):  # earlier tensors keep the earlier pages
            self._pages = new_pages(1 << (first + num_bytes).bit_length())
        own = torch.frombuffer(self._pages, dtype=torch.uint8, count=num_bytes, offset=first).untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(own, 0, tensor.shape, tensor.stride())

    def fill(self, dtype: torch.dtype, mean: float, spread: float) -> None:
        """Write normally distributed numbers to all pages, as far as torch can draw them in this type."""
        if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1):
            torch.frombuffer(self._pages, dtype=dtype).normal_(mean, spread)


def new_pages(num_bytes: int) -> mmap.mmap:
    """Return at least as many bytes of zeros, which take no memory before they are written."""
    return mmap.mmap(-1, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _extent(tensor: Tensor) -> int:
    """Return the bytes from the first to the last element of a strided tensor."""
    form = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return form.untyped_storage().nbytes()


def make_placeholder(parameter: nn.Parameter, pages: SharedPages) -> None:
    """Let a strided parameter of the CPU use shared pages. Its content is lost; it stays the same object."""
    parameter.data = pages.tensor_like(parameter)
    setattr(parameter, _MARK, True)


def is_placeholder(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter that shares its memory with others."""
    return hasattr(tensor, _MARK)


def has_placeholders(model: nn.Module) -> bool:
    """Return whether any parameter of a model is a placeholder."""
    return any(map(is_placeholder, model.parameters()))


def randomize_placeholders(model: nn.Module) -> None:
    """Give the placeholders of a model random numbers.

    Matrices get numbers that keep the size of their inputs (a variance of 1 / fan-in; LeCun et al., "Efficient
    BackProp", 1998, section 4.6), the scales of normalization layers get numbers near 1, and biases small ones. Two
    parameters of a shape have different numbers.
    """
    alike: dict[tuple[float, float, torch.dtype], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if is_placeholder(parameter):
            alike.setdefault((*_distribution(name, parameter), parameter.dtype), []).append(parameter)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        for (mean, spread, dtype), parameters in alike.items():
            pages = SharedPages(max(map(_extent, parameters)) + _ALIGNED * len(parameters))
            pages.fill(dtype, mean, spread)
            for parameter in parameters:
                parameter.data = pages.tensor_like(parameter)


def _distribution(name: str, parameter: nn.Parameter) -> tuple[float, float]:
    """Return the mean and the spread of the numbers of a parameter."""
    if parameter.dim() < 2:
        return (0.0 if name.endswith("bias") else 1.0), _NEAR
    return 0.0, 1 / math.sqrt(max(parameter[0].numel(), 1))

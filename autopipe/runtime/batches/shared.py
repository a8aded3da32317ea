"""A minibatch that another process gives: JSON values, and memory that both map, with the bytes of its tensors.

A tensor has the same strides there. The memory is freed with the last tensor in it.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch
from torch import Tensor

from autopipe.runtime.audit.batch import UnstorableBatchError, tree_of, value_of
from autopipe.strides import copied, extent

_ALIGNED = 64  # bytes, as torch allocates


def share(item: Any) -> tuple[Any, list[Any], int]:
    """Return a minibatch as JSON values, the descriptions of its tensors, and a file descriptor with their bytes.

    Raises: UnstorableBatchError naming the first type that cannot be sent.
    """
    sent: dict[int, tuple[int, Tensor]] = {}  # id of a tensor -> its number, and what is sent of it

    def number(tensor: Tensor) -> dict[str, Any]:
        if id(tensor) not in sent:
            sent[id(tensor)] = len(sent), _sendable(tensor)
        return {"tensor": sent[id(tensor)][0]}

    tree = tree_of(item, number)
    described, size = [], 0
    for _, tensor in sent.values():
        span = extent(tensor.shape, tensor.stride()) * tensor.dtype.itemsize
        described.append(
            {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "strides": list(tensor.stride()),
                "requires_grad": tensor.requires_grad,
                "start": size,
                "bytes": span,
            }
        )
        size += -(-span // _ALIGNED) * _ALIGNED
    memory = os.memfd_create("minibatch")
    try:
        os.truncate(memory, max(size, 1))
        content = mmap.mmap(memory, max(size, 1))
        for entry, (_, tensor) in zip(described, sent.values(), strict=True):
            flat = _flat(content, entry, tensor.dtype)
            flat.copy_(tensor.detach().as_strided(flat.shape, (1,)))
    except BaseException:
        os.close(memory)
        raise
    return tree, described, memory


def shared(tree: Any, described: list[Any], memory: int) -> Any:
    """Return the minibatch of which ``share`` gave these, and close the file descriptor."""
    try:
        content = mmap.mmap(memory, 0)
    finally:
        os.close(memory)
    tensors = []
    for entry in described:
        flat = _flat(content, entry, getattr(torch, entry["dtype"]))
        tensors.append(flat.as_strided(entry["shape"], entry["strides"]).requires_grad_(entry["requires_grad"]))
    return value_of(tree, lambda entry: tensors[entry["tensor"]])


def _flat(content: mmap.mmap, entry: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """Return the elements of a tensor in the memory, in their order there."""
    if not entry["bytes"]:
        return torch.empty(0, dtype=dtype)
    count = entry["bytes"] // dtype.itemsize
    return torch.frombuffer(content, dtype=torch.uint8, offset=entry["start"], count=entry["bytes"]).view(dtype)[:count]


def _sendable(tensor: Tensor) -> Tensor:
    plain = not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or not plain:
        raise UnstorableBatchError(f"it contains a {tensor.dtype} tensor of layout {tensor.layout} on {tensor.device}")
    if extent(tensor.shape, tensor.stride()) > 2 * tensor.numel():  # a slice of a large table
        return copied(tensor.detach()).requires_grad_(tensor.requires_grad)
    return tensor


__all__ = ["share", "shared"]

"""What a plain forward keeps for its backward, counted independently of the profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def with_saved_bytes(forward: Callable[[], Any], own: Iterable[Tensor]) -> tuple[Any, int]:
    """Call ``forward``, and return its result and the bytes that it saves: every memory once, without ``own``."""
    left_out = {tensor.untyped_storage().data_ptr() for tensor in own}
    saved = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, sum(t.untyped_storage().nbytes() for pointer, t in saved.items() if pointer not in left_out)

"""Floating-point operations and memory traffic of dispatched operations, on any device, also on ``meta``.

Flops are those of ``torch.utils.flop_counter`` (a multiply-add counts as two), with formulas here for CPU kernels that
it does not know. Bytes: every operand once and every result once. Views and uninitialized memory move nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from autopipe.ir.profile import PassWork

# operations that move no data
_STILL = ("empty", "new_empty", "detach", "alias", "lift_fresh", "_local_scalar_dense", "set_")
# operations that read as much of their first operand as they return
_GATHER = ("embedding", "index", "index_select", "gather", "_unsafe_index", "select_backward", "slice_backward")


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(*_of_all_heads(query, key, value)))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, *_of_all_heads(query, key, value)))  # type: ignore[no-untyped-call]


def _of_all_heads(query: Tensor, *others: Tensor) -> list[tuple[int, ...]]:
    """Return the shapes with as many heads as the query has. Before torch 2.13, the formulas refuse grouped queries."""
    batch, heads = query.shape[:2]
    return [tuple(query.shape), *((batch, heads, *other.shape[2:]) for other in others)]


def _recurrent(steps: Tensor, *arguments: Any, **_: Any) -> int:
    """Count one layer of a recurrent network: its two weights (4 gates by inputs, by hidden units) at every step."""
    samples = math.prod(steps.shape[:-1])
    weights = [entry for entry in arguments[:2] if isinstance(entry, Tensor)]
    return 2 * samples * sum(weight.numel() for weight in weights)


def _recurrent_backward(steps: Tensor, *arguments: Any, **_: Any) -> int:
    return 2 * _recurrent(steps, *arguments)


def _vector(matrix: Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _added_vector(_: Tensor, matrix: Tensor, *__: Any, **___: Any) -> int:
    return 2 * matrix.numel()


_ATTENTIONS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_OWN: dict[str, Callable[..., int]] = {
    **{f"_scaled_dot_product_{name}": _attention for name in _ATTENTIONS},
    **{f"_scaled_dot_product_{name}_backward": _attention_backward for name in _ATTENTIONS},
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": _recurrent_backward,
    "mv": _vector,
    "dot": _vector,
    "addmv": _added_vector,
}


class WorkCounter(TorchDispatchMode):
    """Counts the operations of this thread, and of the backward that it starts. Use one counter per pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._flops = self._matrix_bytes = self._other_bytes = self._repeated_flops = self._kernels = 0

    @property
    def counted(self) -> PassWork:
        """The work so far."""
        return PassWork(self._flops, self._matrix_bytes, self._other_bytes, self._repeated_flops, self._kernels)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it."""
        result = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.rpartition("::")
        if space == "prim" or getattr(func, "is_view", False) or name.startswith(_STILL):
            return result
        flops = _flops_of(func, name, args, kwargs or {}, result)
        moved = _bytes_of(name, args, kwargs or {}, result)
        self._flops += flops
        self._repeated_flops += _repeated(name, args)
        self._kernels += 1
        if flops:
            self._matrix_bytes += moved
        else:
            self._other_bytes += moved
        return result


def _flops_of(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    if name in _OWN:
        return _OWN[name](*args, **kwargs)
    count = flop_registry.get(func.overloadpacket)
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0


def _repeated(name: str, args: tuple[Any, ...]) -> int:
    """Return the operations of an attention backward that compute the products of queries and keys again.

    A fused attention does not keep them. ``sdpa_backward_flop_count`` counts them as one of five products.
    """
    if not (name.startswith("_scaled_dot_product_") and name.endswith("_backward")):
        return 0
    query, key = args[1], args[2]
    return 2 * int(query.numel()) * int(key.shape[-2])


def _bytes_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes read and written: each tensor once as operand and once as result."""
    written = sum(_size(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
    operands = {id(leaf): leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    sizes = [_size(leaf) for leaf in operands.values()]
    if name in _GATHER and sizes:
        sizes[0] = min(sizes[0], written)
    return written + sum(sizes)


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor; an expanded tensor counts with its actual memory."""
    if tensor.layout != torch.strided:
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())

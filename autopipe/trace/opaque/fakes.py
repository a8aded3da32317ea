"""Fake results of calls that torch cannot fake: packed sequences, CTC loss, cumulative batch norm.

This includes grouped matrix products, which torch fakes in bfloat16 only.

The number of rows of a packed sequence depends on the lengths in the batch; it becomes a size that the call defines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)


class Fakes:
    """Functions for the fake results of one recording. They run in place of the calls."""

    def __init__(self, shape_env: ShapeEnv) -> None:
        self.shape_env = shape_env
        self._batch: Any = WeakIdKeyDictionary()  # batch_sizes -> number of sequences
        self._functions: dict[str, Callable[..., Any]] = {
            "_pack_padded_sequence": self._pack,
            "_pad_packed_sequence": self._pad,
            "ctc_loss": self._ctc_loss,
            "_grouped_mm": _grouped_mm,
        }

    def function(self, name: str) -> Callable[..., Any] | None:
        """Return a function for the fake result of a call, or None if torch can fake it."""
        return self._functions.get(name)

    def module(self, module: nn.Module, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return a function for the fake result of a leaf module, or None if torch can fake it."""
        if isinstance(module, _RECURRENT) and args and isinstance(args[0], PackedSequence):
            return lambda packed, hidden=None: self._recurrent(module, packed)
        if isinstance(module, _BatchNorm) and module.momentum is None and module.training:
            return lambda *inputs: _with_momentum(module, *inputs)
        return None

    def _pack(self, input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        batch, longest = (0, 1) if batch_first else (1, 0)
        rows, steps = self._size(), self._size()
        torch._check(steps <= input.shape[longest])  # type: ignore[no-untyped-call]
        data = _like(input, (rows, *input.shape[2:]), input)
        batch_sizes = torch.empty((steps,), dtype=torch.int64)
        self._batch[batch_sizes] = input.shape[batch]
        return data, batch_sizes

    def _pad(
        self, data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, total_length: Any
    ) -> tuple[Tensor, Tensor]:
        batch = self._batch[batch_sizes]
        leading = (batch, total_length) if batch_first else (total_length, batch)
        return _like(data, (*leading, *data.shape[1:]), data), torch.empty((batch,), dtype=torch.int64)

    def _recurrent(self, module: Any, packed: PackedSequence) -> tuple[PackedSequence, Any]:
        directions = 2 if module.bidirectional else 1
        batch = self._batch[packed.batch_sizes]
        width = getattr(module, "proj_size", 0) or module.hidden_size
        weights = [packed.data, *module.parameters()]
        data = _like(packed.data, (packed.data.shape[0], directions * width), *weights)
        layers = directions * module.num_layers
        hidden: Any = _like(packed.data, (layers, batch, width), *weights)
        if isinstance(module, nn.LSTM):
            hidden = hidden, _like(packed.data, (layers, batch, module.hidden_size), *weights)
        if module.training and module.dropout > 0:
            for _ in range(module.num_layers - 1):  # counted like the real draws
                torch.dropout(data, module.dropout, train=True)
        return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices), hidden

    def _ctc_loss(  # torch's own signature
        self,
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: str = "mean",
        zero_infinity: bool = False,
    ) -> Tensor:
        shape = log_probs.shape[1:2] if reduction == "none" and log_probs.dim() == 3 else ()
        return _like(log_probs, tuple(shape), log_probs)

    def _size(self) -> torch.SymInt:
        size = self.shape_env.create_unbacked_symint()
        torch._check(size >= 1)  # type: ignore[no-untyped-call]
        return size


def _grouped_mm(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Fake a grouped product: groups of rows give their rows; groups along the inner side give one matrix each."""
    shape = (*left.shape[:-1], right.shape[-1])
    if left.dim() == 2 and right.dim() == 2:
        assert offs is not None
        shape = (offs.shape[0], *shape)
    elif left.dim() == 3 and right.dim() == 2:
        shape = shape[1:]
    fake = _like(left, shape, left, right)
    return fake if out_dtype is None else fake.to(out_dtype)


def _with_momentum(module: _BatchNorm, *inputs: Tensor) -> Any:
    """Run a batch norm that has ``momentum=None`` with a number instead, which does not affect the shapes."""
    module.momentum = 0.1
    try:
        return module(*inputs)
    finally:
        module.momentum = None


def _like(model: Tensor, shape: tuple[Any, ...], *sources: Tensor) -> Tensor:
    """Return an empty tensor of another shape, with gradients to ``sources`` as in the real call."""
    fake = torch.empty(shape, dtype=model.dtype, device=model.device)
    for source in sources:
        if source.requires_grad and torch.is_grad_enabled():
            return fake + source.sum() * 0
    return fake

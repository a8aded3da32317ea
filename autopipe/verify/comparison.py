"""``Comparison``: how far training in stages is from plain training, tensor by tensor, and how far it may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from autopipe import sparse
from autopipe.ir.rounding import allowed


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One parameter or buffer. ``error``: largest difference over steps, relative to the tensor's largest value.

    ``gradient``: the same of its gradients alone. ``noise``, ``gradient_noise``: these two between two plain runs that
    add up in another order, where that was measured. ``order``: ``error`` between the plain loop in the plan's order of
    sums and the plain loop in one process's; 0 where the two are one. ``order_gradient``: the same of the first step's
    gradient alone, which is rounding and nothing else; ``order_weight``: of the tensor after the last step, where the
    optimizer has enlarged it.
    """

    name: str
    error: float
    bitwise: bool
    owner: int
    noise: float = 0.0
    gradient: float = 0.0
    gradient_noise: float = 0.0
    order: float = 0.0
    order_gradient: float = 0.0
    order_weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """``promised``: the result should be equal to the last bit. ``reasons``: why it is not promised.

    ``noise``, ``gradient_noise``: what the order of additions alone changes in the middle tensor, and in its gradients,
    measured where bits are not promised: the plain loop against itself with its microbatches added up in reverse. An
    optimizer that divides by the gradient's size enlarges it, so gradients are held to the noise of gradients. A tensor
    whose true gradient is zero is nothing but noise, and excuses no other one.
    ``nonfinite``: what is no finite number, "" where all is finite; then nothing is proven, whatever agrees.
    ``orders``: why the plan adds up in another order than one process, empty where it does not; the comparison is with
    a plain loop in the plan's order then.
    ``first_gradients``, ``first_weights``: whether the first step's gradients, and the weights after it, are equal to
    the last bit. ``unequal_gradients``: parameters whose first gradient is not, by name.
    """

    differences: tuple[TensorDifference, ...]
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    promised: bool
    reasons: tuple[str, ...]
    noise: float = 0.0
    nonfinite: str = ""
    gradient_noise: float = 0.0
    orders: tuple[str, ...] = ()
    first_gradients: bool = True
    first_weights: bool = True
    unequal_gradients: tuple[str, ...] = ()

    @property
    def order_error(self) -> float:
        """The largest difference between the plan's order of sums and one process's, of any tensor."""
        return max((d.order for d in self.differences), default=0.0)

    @property
    def tolerance(self) -> float:
        """The largest difference that any tensor was allowed; 0 where every bit has to agree."""
        return 0.0 if self.promised else max(allowed(self.noise, d.noise) for d in self.differences)

    @property
    def gradient_tolerance(self) -> float:
        """The same of gradients."""
        if self.promised:
            return 0.0
        return max(allowed(self.gradient_noise, d.gradient_noise) for d in self.differences)

    @property
    def bitwise(self) -> bool:
        """Not one bit differs, losses included."""
        return not self.nonfinite and all(d.bitwise for d in self.differences) and self.losses == self.reference_losses

    @property
    def max_relative_error(self) -> float:
        """The largest error of any tensor or loss."""
        losses = [scalar_error(a, b) for a, b in zip(self.losses, self.reference_losses, strict=True)]
        return max([d.error for d in self.differences] + losses, default=0.0)

    @property
    def equal(self) -> bool:
        """Whether all is as equal as docs/semantics.md promises. A value that is not finite is never equal."""
        if self.nonfinite:
            return False
        if self.promised:
            return self.bitwise
        losses = zip(self.losses, self.reference_losses, strict=True)
        return all(scalar_error(a, b) <= allowed(self.noise) for a, b in losses) and all(
            d.error <= allowed(self.noise, d.noise) and d.gradient <= allowed(self.gradient_noise, d.gradient_noise)
            for d in self.differences
        )


@dataclass(slots=True)
class Worst:
    """The largest difference seen of each tensor, and of the gradients alone."""

    errors: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    unequal: set[str] = field(default_factory=set)
    nonfinite: list[str] = field(default_factory=list)

    def add_gradient(
        self, name: str, ours: torch.Tensor | None, theirs: torch.Tensor | None, *, may_overflow: bool = False
    ) -> None:
        """Compare a gradient. ``may_overflow``: it may be too large for float16, on both sides."""
        error = self.add(name, ours, theirs, may_overflow=may_overflow)
        self.gradients[name] = max(self.gradients.get(name, 0.0), error)

    def add(
        self, name: str, ours: torch.Tensor | None, theirs: torch.Tensor | None, *, may_overflow: bool = False
    ) -> float:
        """Compare a tensor; return its relative error."""
        if ours is None or theirs is None:
            same = ours is None and theirs is None
            error = 0.0 if same else float("inf")
        else:
            same = sparse.equal(ours, theirs)
            same = same or (may_overflow and _overflowed(ours) and _overflowed(theirs))
            error = 0.0 if same else relative_error(ours, theirs)
            if not same and _holds_nan(ours) and _holds_nan(theirs):
                self.nonfinite.append(name)
        self.errors[name] = max(self.errors.get(name, 0.0), error)
        if not same:
            self.unequal.add(name)
        return error


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return max |a - b| / max |b|; infinite where shapes differ, and where a value is NaN: that equals nothing."""
    if ours.shape != theirs.shape:
        return float("inf")
    a, b = sparse.dense(ours).double(), sparse.dense(theirs).double()
    same = a == b
    if bool(same.all()):
        return 0.0
    error = float((a - b).abs()[~same].max() / b.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
    return error if error == error else float("inf")  # noqa: PLR0124 - NaN is not itself


def _holds_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(sparse.dense(tensor).isnan().any())


def _overflowed(tensor: torch.Tensor) -> bool:
    """Whether a gradient was too large for float16: the step is left out and the scale comes down, on both sides."""
    return not bool(sparse.dense(tensor).isfinite().all())


def nonfinite(losses: Sequence[float], reference: Sequence[float], tensors: Sequence[str]) -> str:
    """Say what is no finite number, first of all in which step; "" where all is."""
    for step, pair in enumerate(zip(losses, reference, strict=True), start=1):
        ours, theirs = (math.isfinite(loss) for loss in pair)
        if not ours and not theirs:
            return f"both not finite at step {step}: the loss is {pair[0]} in stages and {pair[1]} in plain training"
        if not ours or not theirs:
            where = "in stages only" if theirs else "in plain training only"
            return f"not finite at step {step}, {where}: the loss is {pair[0]} in stages, {pair[1]} in plain training"
    return f"both not finite: {tensors[0]} ({len(tensors)} in all)" if tensors else ""


def scalar_error(a: float, b: float) -> float:
    """Return the relative error of a loss."""
    return relative_error(torch.tensor([a]), torch.tensor([b]))

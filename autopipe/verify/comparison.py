"""``Comparison``: the differences between training in stages and plain training, by tensor, and their tolerance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from autopipe import sparse
from autopipe.ir.rounding import allowed


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The differences of one parameter or buffer. Errors are relative to the largest value of the tensor."""

    name: str
    # the largest over all steps, gradients included
    error: float
    # whether it is equal to the last bit
    bitwise: bool
    # the stage that steps it; -1: none
    owner: int
    # ``error`` and ``gradient`` between two plain runs of the same arithmetic in another order or on another path
    noise: float = 0.0
    # ``error`` of the gradients alone
    gradient: float = 0.0
    gradient_noise: float = 0.0
    # ``error`` between plain loops in the plan's order of sums and in that of one process; 0 if these are the same
    order: float = 0.0
    # the same for the gradient of the first step, which is rounding alone
    order_gradient: float = 0.0
    # the same for the tensor after the last step, where the optimizer has amplified it
    order_weight: float = 0.0
    # the part of ``noise`` that another order of sums makes, without a compiler or another path
    reordered: float = 0.0


# of the largest value of a tensor: with more noise, nothing but rounding is left of its gradient
_ROUNDING_ALONE = 0.1


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing a run in stages with plain training.

    Noise is the effect of rounding alone. It is measured if bitwise equality is not promised, between the plain loop
    and the same loop with its microbatches added in reverse, in parts, compiled, or on the path of the model that was
    captured (docs/semantics.md). An optimizer that divides by the size of the gradient amplifies it, so gradients are
    compared with the noise of gradients. A tensor whose true gradient is zero consists of noise, and must not raise the
    tolerance of other tensors: hence the median.
    """

    differences: tuple[TensorDifference, ...]
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    # the result must be equal to the last bit
    promised: bool
    # why it need not be
    reasons: tuple[str, ...]
    # of the median tensor
    noise: float = 0.0
    # what is not finite, "" if everything is finite; if not, nothing is proven
    nonfinite: str = ""
    # of the gradients of the median tensor
    gradient_noise: float = 0.0
    # why the plan adds up in another order than one process; if any, the reference is a plain loop in the plan's order
    orders: tuple[str, ...] = ()
    # whether the gradients of the first step, and the weights after it, are equal to the last bit
    first_gradients: bool = True
    first_weights: bool = True
    # parameters whose first gradient is not
    unequal_gradients: tuple[str, ...] = ()

    @property
    def order_error(self) -> float:
        """The largest difference of any tensor between the plan's order of sums and that of one process."""
        return max((d.order for d in self.differences), default=0.0)

    @property
    def rounding_alone(self) -> tuple[str, ...]:
        """The tensors whose gradients are zero but for rounding, so that they prove nothing: they equal the noise."""
        return tuple(
            d.name
            for d in self.differences
            if not self.promised and d.reordered >= _ROUNDING_ALONE and d.error <= allowed(self.noise, d.noise)
        )

    @property
    def tolerance(self) -> float:
        """The largest tolerance of any tensor, without ``rounding_alone``. 0: every bit must agree."""
        if self.promised:
            return 0.0
        alone = {*self.rounding_alone}
        return max((allowed(self.noise, d.noise) for d in self.differences if d.name not in alone), default=0.0)

    @property
    def gradient_tolerance(self) -> float:
        """The largest gradient tolerance over all tensors; 0: every bit must agree."""
        if self.promised:
            return 0.0
        alone = {*self.rounding_alone}
        noise = (d.gradient_noise for d in self.differences if d.name not in alone)
        return max((allowed(self.gradient_noise, each) for each in noise), default=0.0)

    @property
    def bitwise(self) -> bool:
        """Whether everything is equal to the last bit, losses included."""
        return not self.nonfinite and all(d.bitwise for d in self.differences) and self.losses == self.reference_losses

    @property
    def max_relative_error(self) -> float:
        """The largest error of any tensor or loss, without ``rounding_alone``."""
        losses = [scalar_error(a, b) for a, b in zip(self.losses, self.reference_losses, strict=True)]
        alone = {*self.rounding_alone}
        return max([d.error for d in self.differences if d.name not in alone] + losses, default=0.0)

    @property
    def equal(self) -> bool:
        """Whether everything is as equal as docs/semantics.md promises. A value that is not finite is never equal."""
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
    """Collects the largest difference of each tensor, and of its gradients alone."""

    errors: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    unequal: set[str] = field(default_factory=set)
    nonfinite: list[str] = field(default_factory=list)

    def add_gradient(
        self, name: str, ours: torch.Tensor | None, theirs: torch.Tensor | None, *, may_overflow: bool = False
    ) -> None:
        """Compare a gradient. ``may_overflow``: both sides may exceed the range of float16."""
        error = self.add(name, ours, theirs, may_overflow=may_overflow)
        self.gradients[name] = max(self.gradients.get(name, 0.0), error)

    def add(
        self, name: str, ours: torch.Tensor | None, theirs: torch.Tensor | None, *, may_overflow: bool = False
    ) -> float:
        """Compare a tensor and return its relative error."""
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
    """Return max |a - b| / max |b|. Infinite if shapes differ or a value is NaN."""
    if ours.shape != theirs.shape:
        return float("inf")
    a, b = sparse.wide(ours), sparse.wide(theirs)
    same = a == b
    if bool(same.all()):
        return 0.0
    error = float((a - b).abs()[~same].max() / b.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
    return error if error == error else float("inf")  # noqa: PLR0124 - NaN is not itself


def _holds_nan(tensor: torch.Tensor) -> bool:
    return bool(sparse.dense(tensor).isnan().any())


def _overflowed(tensor: torch.Tensor) -> bool:
    """Return whether a gradient exceeded the range of float16: both sides skip the step and reduce the scale."""
    return not bool(sparse.dense(tensor).isfinite().all())


def nonfinite(losses: Sequence[float], reference: Sequence[float], tensors: Sequence[str]) -> str:
    """Return what is not finite, with its step for losses; "" if everything is finite."""
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

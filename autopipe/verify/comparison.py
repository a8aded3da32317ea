"""``Comparison``: the differences between training in stages and plain training, by tensor, and their tolerance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
ROUNDING_ALONE = 0.1
# elements that are compared in the cache of a processor
_BLOCK = 1 << 16


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
    # parameters that are equal, with all gradients, while the optimizer's state for them is not
    unequal_states: tuple[str, ...] = ()
    # how many of the steps a loss scale skipped, because a gradient was not finite
    skipped: int = 0
    # what is compared with nothing, and why
    left_out: tuple[str, ...] = ()
    # the loss of an evaluation in stages, and of the model with the same weights; (): none was compared
    evaluation: tuple[float, ...] = ()

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
            if not self.promised and d.reordered >= ROUNDING_ALONE and d.error <= allowed(self.noise, d.noise)
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
        same = all(a == b for a, b in self._evaluations) and self.losses == self.reference_losses
        return not self.nonfinite and all(d.bitwise for d in self.differences) and same

    @property
    def max_relative_error(self) -> float:
        """The largest error of any tensor or loss, without ``rounding_alone``."""
        pairs = (*zip(self.losses, self.reference_losses, strict=True), *self._evaluations)
        losses = [scalar_error(a, b) for a, b in pairs]
        alone = {*self.rounding_alone}
        return max([d.error for d in self.differences if d.name not in alone] + losses, default=0.0)

    @property
    def equal(self) -> bool:
        """Whether everything is as equal as docs/semantics.md promises. A value that is not finite is never equal."""
        return not self.nonfinite and not self.different

    @property
    def _evaluations(self) -> list[tuple[float, float]]:
        return [(self.evaluation[0], self.evaluation[1])] if self.evaluation else []

    @property
    def different_evaluation(self) -> bool:
        """Whether the evaluation differs by more than is promised."""
        bound = 0.0 if self.promised else allowed(self.noise)
        return any(a != b and scalar_error(a, b) > bound for a, b in self._evaluations)

    @property
    def different(self) -> bool:
        """Whether something differs by more than docs/semantics.md promises.

        A value that is finite on one side only differs; one that is finite on neither proves nothing.
        """
        pairs = zip(self.losses, self.reference_losses, strict=True)
        losses = [(a, b) for a, b in (*pairs, *self._evaluations) if math.isfinite(a) or math.isfinite(b)]
        if self.promised:
            return any(a != b for a, b in losses) or not all(d.bitwise for d in self.differences)
        return any(scalar_error(a, b) > allowed(self.noise) for a, b in losses) or any(
            d.error > allowed(self.noise, d.noise) or d.gradient > allowed(self.gradient_noise, d.gradient_noise)
            for d in self.differences
        )


@dataclass(slots=True)
class Worst:
    """Collects the largest difference of each tensor, of its gradients alone, and of the optimizer's state for it."""

    errors: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    states: dict[str, float] = field(default_factory=dict)
    unequal: set[str] = field(default_factory=set)
    nonfinite: list[str] = field(default_factory=list)

    def add_gradient(
        self, name: str, ours: torch.Tensor | None, theirs: torch.Tensor | None, *, skipped: bool = False
    ) -> None:
        """Compare a gradient. ``skipped``: of a step that a loss scale skips on both sides."""
        error = self.add(name, ours, theirs, skipped=skipped)
        self.gradients[name] = max(self.gradients.get(name, 0.0), error)

    def add_state(self, name: str, ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
        """Compare the state of the optimizer for a parameter."""
        errors = Worst()
        for key in {**ours, **theirs}:
            errors.add(name, ours.get(key), theirs.get(key))
        self.states[name] = max(self.states.get(name, 0.0), errors.errors.get(name, 0.0))
        self.unequal |= errors.unequal

    def add(
        self,
        name: str,
        ours: torch.Tensor | None,
        theirs: torch.Tensor | None,
        *,
        skipped: bool = False,
        least: float = 0.0,
    ) -> float:
        """Compare a tensor and return its relative error. ``least``: see ``relative_error``."""
        if ours is None or theirs is None:
            error = 0.0 if ours is None and theirs is None else float("inf")
            same = not error
        else:
            same = sparse.equal(ours, theirs)
            error = 0.0 if same else relative_error(ours, theirs, least)
            if not math.isfinite(error) and ours.shape == theirs.shape:
                error, one_sided = _errors_of_nonfinite(ours, theirs)
                same = not error and not one_sided
                if skipped:
                    error = max(error, one_sided)
                elif one_sided:
                    error = float("inf")
                else:
                    self.nonfinite.append(name)
        self.errors[name] = max(self.errors.get(name, 0.0), error)
        if not same:
            self.unequal.add(name)
        return error


def relative_error(ours: torch.Tensor, theirs: torch.Tensor, least: float = 0.0) -> float:
    """Return max |a - b| / max(|b|, ``least``). Infinite if shapes differ or a value is NaN."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    pairs = zip(*(torch.split(sparse.dense(t).flatten(), _BLOCK) for t in (ours, theirs)), strict=True)
    largest = torch.stack([_largest(sparse.wide(a), sparse.wide(b)) for a, b in pairs]).amax(0)
    error = float(largest[0] / largest[1].clamp_min(max(least, torch.finfo(torch.float32).tiny)))
    return error if error == error else float("inf")  # noqa: PLR0124 - NaN is not itself


def _largest(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the largest difference of two tensors, and the largest value of the second; NaN if there is one."""
    return torch.stack([(a - b).abs().masked_fill(a == b, 0.0).max(), b.abs().max()])


def _errors_of_nonfinite(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """Return the error of the elements that are finite on both sides, and the part that is so on one side only."""
    a, b = sparse.wide(ours), sparse.wide(theirs)
    both = a.isfinite() & b.isfinite()
    one_sided = (a.isfinite() ^ b.isfinite()).float().mean()
    return relative_error(a[both], b[both]), float(one_sided)


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

"""Verify axes on a real batch: a team in one process has the loss and gradients of the complete graph."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopipe.ir.teams.axes import Axis, Place
from autopipe.ir.teams.axis_sets import choose
from autopipe.trace.axes.members import Members, TeamOutcome
from autopipe.trace.axes.sums_over_members import joined
from autopipe.trace.graph.replay import replay
from autopipe.trace.record.model_snapshot import left_as_it_was
from autopipe.trace.result import Capture

logger = logging.getLogger(__name__)
_TOLERANCE = 2e-4  # of the largest gradient of a parameter: sums are added in another order
_ROUNDING = 1e-6  # of the largest gradient of the model, for gradients that are zero but for rounding
_CHANGE = 1e-6  # relative, of all weights, to see whether gradients jump
_TRIALS = 2
_MARGIN = 3.0  # of the largest jump that was seen
_MOST = 0.03  # of the norm of a gradient; a larger difference is not due to rounding
_TOLERANCE_16_BIT = 3e-2  # of both, if a value has a 16-bit dtype


@dataclass(frozen=True)
class Verified:
    """The axes that hold, and a note for each that does not."""

    axes: tuple[Axis, ...]
    notes: tuple[str, ...]


def choose_verified(
    capture: Capture, axes: Sequence[Axis], leaves: Mapping[str, Tensor], team: int, *, seed: int = 0
) -> Verified:
    """Return the axes that a team shards (``ir.teams.axis_sets.choose``) and that hold on a batch.

    ``leaves``: the tensors of a batch by input, preferably of another size than the captured batch, so that a number
    that depends on it is noticed. In place of an axis that does not hold, those that it excluded are chosen. A model
    without memory (on the meta device) is not verified, and a note says so.
    """
    if any(parameter.is_meta for parameter in capture.module.parameters()):
        return Verified(choose(capture.graph, axes, team), ("axes are not verified: the model is on the meta device",))
    candidates, notes = list(axes), list[str]()
    while True:
        chosen = choose(capture.graph, candidates, team)
        outcome = verified(capture, chosen, leaves, team, seed=seed)
        notes += outcome.notes
        if len(outcome.axes) == len(chosen):
            nothing = () if chosen else (f"no parameter can be sharded over {team} processes",)
            return Verified(chosen, (*notes, *nothing))
        failed = {axis.name for axis in chosen} - {axis.name for axis in outcome.axes}
        candidates = [axis for axis in candidates if axis.name not in failed]


def verified(
    capture: Capture, axes: Sequence[Axis], leaves: Mapping[str, Tensor], team: int, *, seed: int = 0
) -> Verified:
    """Return the axes of a set without conflicts that hold on a batch. The model's state does not change.

    ``leaves``: the tensors of the batch by input. Memory: the values and gradients of ``team`` complete models, less
    what is cut.
    """
    if not axes:
        return Verified((), ())
    whole = Whole(capture, leaves, seed)
    if not whole.difference(axes, team):
        return Verified(tuple(axes), ())
    notes: list[str] = []
    kept = _holding(whole, axes, team, notes)
    why = whole.difference(kept, team) if kept else ""
    if why:
        return Verified((), (*notes, f"no axis is sharded: together they do not hold: {why}"))
    return Verified(tuple(kept), tuple(notes))


def _holding(whole: Whole, axes: Sequence[Axis], team: int, notes: list[str]) -> list[Axis]:
    """Return the axes that hold, by halves; a note is added for each other."""
    why = whole.difference(axes, team)
    if not why:
        return [*axes]
    if len(axes) == 1:
        notes.append(f"axis {axes[0].name} is not sharded: {why}")
        return []
    middle = len(axes) // 2
    return _holding(whole, axes[:middle], team, notes) + _holding(whole, axes[middle:], team, notes)


class Whole:
    """The loss and gradients of the complete graph on one batch."""

    def __init__(self, capture: Capture, leaves: Mapping[str, Tensor], seed: int) -> None:
        self._capture, self._leaves, self._where = capture, leaves, (seed, 0, 0)
        self._outputs, self._gradients = self._run()
        specs = [node.spec for node in capture.graph.nodes if node.spec is not None]
        narrow = any(spec.dtype in ("bfloat16", "float16") for spec in specs)
        self._tolerances = (_TOLERANCE_16_BIT,) * 2 if narrow else (_TOLERANCE, _ROUNDING)
        self._largest = max((float(g.abs().max()) for g in self._gradients.values() if g is not None), default=0.0)

    def _run(self) -> tuple[tuple[Tensor, ...], dict[str, Tensor | None]]:
        """Return the outputs, and the gradients by parameter. The model's state does not change."""
        module, leaves = self._capture.module, {name: leaf.clone() for name, leaf in self._leaves.items()}
        parameters = dict(module.named_parameters())
        aliases = self._capture.graph.aliases
        with left_as_it_was(module):
            for parameter in parameters.values():
                parameter.grad = None
            outputs = replay(module, leaves, self._where)
            if outputs[0].requires_grad:
                outputs[0].backward()  # type: ignore[no-untyped-call]  # torch has no annotation for it
            gradients = {aliases.get(name, name): parameter.grad for name, parameter in parameters.items()}
        return outputs, gradients

    @functools.cached_property
    def _jump(self) -> float:
        """The largest relative change of a gradient when all weights change by little more than rounding.

        It is far above the rounding of sums if a value is at a jump of the backward pass, as a ReLU's input at zero is.
        """
        generator, largest = torch.Generator().manual_seed(0), 0.0
        weights = [p for p in self._capture.module.parameters() if p.is_floating_point()]
        saved = [weight.detach().clone() for weight in weights]
        for _ in range(_TRIALS):
            try:
                with torch.no_grad():
                    for weight in weights:
                        change = torch.randn(weight.shape, generator=generator).to(weight)
                        weight.mul_(1 + _CHANGE * change)
                _, gradients = self._run()
            finally:
                with torch.no_grad():
                    for weight, value in zip(weights, saved, strict=True):
                        weight.copy_(value)
            for name, whole in self._gradients.items():
                other = gradients[name]
                if whole is not None and other is not None:
                    largest = max(largest, self._relative(whole, other))
        return largest

    def _relative(self, wanted: Tensor, actual: Tensor) -> float:
        """Return the norm of a difference of gradients, relative to the gradient, less what rounding explains."""
        rounding = self._tolerances[1] * self._largest * math.sqrt(wanted.numel())
        excess = float((actual - wanted).norm()) - rounding
        return excess / max(float(wanted.norm()), rounding) if excess > 0 else 0.0 * excess  # NaN stays NaN

    def difference(self, axes: Sequence[Axis], team: int) -> str:
        """Return how a team with these axes differs, or "" if it does not."""
        try:
            outcome = Members(self._capture.graph, self._capture.module, axes, team).run(self._leaves, self._where)
        except Exception as error:  # whatever a call does with sizes that it does not expect
            logger.info("a team with axes %s fails", [axis.name for axis in axes], exc_info=True)
            return f"a member fails: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return self.compared(axes, outcome)

    def compared(self, axes: Sequence[Axis], outcome: TeamOutcome, partial: Sequence[str] = ()) -> str:
        """Return how the outcome of a team differs, or "". ``partial``: further parameters whose gradients it adds."""
        for whole, each in zip(self._outputs, outcome.outputs, strict=True):
            for value in each:
                if not torch.equal(value, each[0]):
                    return "its members compute different losses"
            if not self._close(whole, each[0], float(whole.detach().abs().max())):
                return f"the loss is {float(each[0].detach()):.9g} instead of {float(whole.detach()):.9g}"
        places = {place.name: (axis, place) for axis in axes for place in axis.parameters}
        added = {*partial, *(name for axis in axes for name in axis.partial)}
        for name, gradients in outcome.gradients.items():
            why = self._gradient(name, gradients, places.get(name), name in added)
            if why:
                return f"the gradient of {name} {why}"
        return ""

    def _gradient(self, name: str, each: Sequence[Tensor | None], cut: object, partial: bool) -> str:
        whole = self._gradients.get(name)
        parts = [part for part in each if part is not None]
        if whole is None or len(parts) < len(each):
            return "" if whole is None and not parts else "is missing"
        if isinstance(cut, tuple):
            axis, place = cut
            if _in_padding(parts, place, axis.size):  # it would be a part of the norm of all gradients
                return "is not zero in its padding"
            total = joined(parts, place, axis.size)
        elif partial:
            total = torch.stack(parts).sum(0)
        elif not all(torch.equal(part, parts[0]) for part in parts):
            return "differs between members"
        else:
            total = parts[0]
        if not (self._close(whole, total, float(whole.abs().max())) or self._jumps(whole, total)):
            return f"differs by {float((whole - total).abs().max()):.2g}, the largest is {float(whole.abs().max()):.2g}"
        return ""

    def _close(self, wanted: Tensor, actual: Tensor, scale: float) -> bool:
        relative, rounding = self._tolerances
        difference = float((wanted - actual).detach().abs().max()) if wanted.numel() else 0.0
        return difference <= relative * scale + rounding * self._largest  # False for NaN

    def _jumps(self, wanted: Tensor, actual: Tensor) -> bool:
        """Return whether a difference is of the size of those that rounding of the weights makes by jumps."""
        relative = self._relative(wanted, actual)
        return relative <= _MOST and relative <= _MARGIN * self._jump


def _in_padding(parts: Sequence[Tensor], place: Place, size: int) -> bool:
    """Return whether any of the members' parts has a number other than zero in its padding."""
    dim, local = place.dimension, parts[0].shape[place.dimension]
    whole = place.whole(local, size, len(parts))
    for member, part in enumerate(parts):
        own = sum(stop - start for start, stop in place.ranges(whole, size, member, len(parts)))
        if part.narrow(dim, own, local - own).any():
            return True
    return False

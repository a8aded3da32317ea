"""``GradientFinisher``: turns the gradients of a minibatch into those that the optimizers take.

In this order: check that they are finite, divide by the loss scale, divide by the weight of the loss, clip. All ranks
take the same decisions, by an ``Agreement``. Nothing is exchanged that the options of the run do not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import nn

from autopipe.errors import RunError
from autopipe.ir.schedule import ScheduleSpec
from autopipe.runtime.events import Reporter
from autopipe.runtime.step.agreement import Agreement
from autopipe.runtime.step.finite import first_nonfinite, largest
from autopipe.runtime.step.losses import LossCollector
from autopipe.runtime.step.scalars import copied_to, read_together
from autopipe.runtime.step.scaler import LossScaler
from autopipe.team import Alone, Team

# The norm of all gradients over all stages, and the factor that clips it.


def norms_of(owned: Iterable[Mapping[str, nn.Parameter]]) -> dict[str, torch.Tensor]:
    """Return the norm of every gradient, by name, on the device."""
    gradients = {name: p.grad for parameters in owned for name, p in parameters.items() if p.grad is not None}
    return {name: torch.linalg.vector_norm(gradient) for name, gradient in gradients.items()}


def global_norm(
    contributed: Sequence[str],
    values: torch.Tensor,
    trainable: Sequence[str],
    dtype: torch.dtype,
    agree: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the norm over all stages, a scalar on the host. Tied parameters count once.

    The arithmetic is that of torch.nn.utils.clip_grad_norm_, in the same order of parameters. ``contributed`` are the
    parameters whose norms, ``values``, this rank contributes. ``agree`` sums a vector over all ranks.
    """
    index = {name: position for position, name in enumerate(trainable)}
    # row 0: the norms; row 1: which parameters have a gradient, because torch leaves the others out of its sum
    norms = torch.zeros(2, len(index), dtype=torch.float64)
    places = [index[name] for name in contributed]
    norms[0, places] = values
    norms[1, places] = 1.0
    norms = agree(norms)
    total: torch.Tensor = torch.linalg.vector_norm(norms[0][norms[1] > 0].to(dtype))
    return total


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the factor of all gradients whose norm exceeds ``limit``; 1 otherwise."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


GradientHook = Callable[[int, int, Mapping[str, nn.Parameter]], None]
"""Called with (stage, minibatch, parameters) when the gradients of a stage are complete, before clipping."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What the ranks agreed on for one minibatch."""

    skip: bool  # the step is skipped
    norm: float | None = None  # of all gradients, before they were clipped; None without clipping


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFinisher:
    """One rank's part in it."""

    rank: int
    request: ScheduleSpec
    loss: LossCollector
    agreement: Agreement
    reporter: Reporter
    # all trainable parameters of the model in its order, the order in which torch.nn.utils.clip_grad_norm_ adds norms
    trainable: Sequence[str]
    # None: no clipping
    clip_norm: float | None = None
    # of the norm of all gradients, as torch computes it
    norm_dtype: torch.dtype = torch.float32
    # None: no loss scale
    scaler: LossScaler | None = None
    # the policy for a step that is not finite; see ``finite``
    on_nonfinite: str = "warn"
    on_gradients: GradientHook | None = None
    team: Team = Alone()  # noqa: RUF009 - it has no state
    # the parameters of which each member of the team has a part
    cut: Set[str] = frozenset()

    def finish(self, minibatch: int, owned: Mapping[int, Mapping[str, nn.Parameter]]) -> Finished:
        """Change the gradients of the ``owned`` parameters, by stage, in place.

        Raises: RunError if a loss or gradient is not finite and the policy is "stop".
        """
        gradients = [p.grad for parameters in owned.values() for p in parameters.values() if p.grad is not None]
        # of replicas, the first contributes the norms
        clipped = [] if self.clip_norm is None else [s for s in owned if self.request.stage_ranks[s][0] == self.rank]
        # nothing changes the gradients before they are clipped: one synchronization with the device for all figures
        at_once = self.scaler is None and not self.loss.weighted
        norms = norms_of(owned[stage] for stage in clipped) if at_once else {}
        checked = {stage: self._largest(owned[stage]) for stage in owned} if self._checks else {}
        figures = read_together([*checked.values(), *norms.values()])
        extremes, values = figures[: len(checked)], figures[len(checked) :]
        finite = dict(zip(checked, extremes.isfinite().tolist(), strict=True))
        if self.on_nonfinite == "stop":
            self._refuse_nonfinite(minibatch, owned, finite)
        skip = False
        if self.scaler is not None or self.on_nonfinite == "skip":
            kept = all(finite.values()) and (self.on_nonfinite != "skip" or self.loss.is_finite(minibatch))
            votes = self.agreement.sum(torch.tensor([float(not kept)], dtype=torch.float64))
            if self.team.size > 1:
                self.team.add(votes)
            skip = bool(votes > 0)
        if self.scaler is not None and gradients:
            torch._foreach_mul_(gradients, self.scaler.inverse)
        if self.loss.weighted:
            # each weight is known to one rank alone; added one by one, as a plain loop adds them
            divisor = sum(self.agreement.sum(self.loss.weights(minibatch)).tolist()) or 1.0
            if divisor != 1.0 and gradients:
                torch._foreach_div_(gradients, divisor)
        if self.on_gradients is not None:
            for stage, parameters in owned.items():
                self.on_gradients(stage, minibatch, parameters)
        if self.clip_norm is not None:
            if not at_once:
                norms = norms_of(owned[stage] for stage in clipped)
                values = read_together(list(norms.values()))
            if self.team.size > 1:
                values = self._of_team(list(norms), values)
            norm = global_norm(list(norms), values, self.trainable, self.norm_dtype, self.agreement.sum)
            factor = clip_factor(norm, self.clip_norm)
            for device, on_device in _by_device(gradients).items():  # those of spilled stages may be on the host
                torch._foreach_mul_(on_device, copied_to(device, factor))
            return Finished(skip, float(norm))
        return Finished(skip)

    def _of_team(self, names: Sequence[str], norms: torch.Tensor) -> torch.Tensor:
        """Return the norms of complete gradients, from those of a member's parts."""
        parts = torch.tensor([name in self.cut for name in names], dtype=torch.bool)
        squares = torch.where(parts, norms.square(), 0.0)
        self.team.add(squares)
        return torch.where(parts, squares.sqrt(), norms)

    @property
    def _checks(self) -> bool:
        """Whether the gradients of every stage are checked. With a loss scale, ranks agree on an infinite gradient."""
        return self.scaler is not None or self.on_nonfinite in ("stop", "skip")

    @staticmethod
    def _largest(parameters: Mapping[str, nn.Parameter]) -> torch.Tensor:
        return largest([p.grad for p in parameters.values() if p.grad is not None])

    def _refuse_nonfinite(
        self, minibatch: int, owned: Mapping[int, Mapping[str, nn.Parameter]], finite: Mapping[int, bool]
    ) -> None:
        """Raise RunError if this rank has a loss or gradient that is not finite.

        With a loss scale, an infinite gradient is usual: the scale is reduced and the step skipped.
        """
        nonfinite = {} if self.loss.is_finite(minibatch) else {self.request.num_stages: "its loss"}
        for stage, parameters in owned.items():
            if self.scaler is None and not finite[stage]:
                nonfinite[stage] = f"the gradient of {first_nonfinite(parameters)} (stage {stage})"
        if nonfinite:
            # backward runs from the loss to stage 0, so the highest number is where it began
            place = max(nonfinite)
            self.reporter.event("nonfinite", step=minibatch, what=nonfinite[place], place=place, policy="stop")
            raise RunError(f"step {minibatch + 1} is not finite: {nonfinite[place]}")


def _by_device(tensors: Sequence[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    divided: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        divided.setdefault(tensor.device, []).append(tensor)
    return divided

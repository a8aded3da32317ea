"""``GradientFinisher``: turns the gradients of a minibatch into those that the optimizers take.

In this order: check that they are finite, divide by the loss scale, divide by the weight of the loss, clip. All ranks
take the same decisions, by an ``Agreement``. Nothing is exchanged that the options of the run do not need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from autopipe.errors import RunError
from autopipe.ir.schedule import ScheduleSpec
from autopipe.runtime.events import Reporter
from autopipe.runtime.step.agreement import Agreement
from autopipe.runtime.step.clipping import clip_factor
from autopipe.runtime.step.finite import all_finite, first_nonfinite
from autopipe.runtime.step.losses import LossCollector
from autopipe.runtime.step.scaler import LossScaler

GradientHook = Callable[[int, int, Mapping[str, nn.Parameter]], None]
"""Called with (stage, minibatch, parameters) when the gradients of a stage are complete, before clipping."""


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

    def finish(self, minibatch: int, owned: Mapping[int, Mapping[str, nn.Parameter]]) -> bool:
        """Change the gradients of the ``owned`` parameters, by stage, in place. Return whether the step is skipped.

        Raises: RunError if a loss or gradient is not finite and the policy is "stop".
        """
        gradients = [p.grad for parameters in owned.values() for p in parameters.values() if p.grad is not None]
        if self.on_nonfinite == "stop":
            self._refuse_nonfinite(minibatch, owned)
        skip = False
        if self.scaler is not None or self.on_nonfinite == "skip":
            finite = all_finite(gradients) and (self.on_nonfinite != "skip" or self.loss.is_finite(minibatch))
            skip = bool(self.agreement.sum(torch.tensor([float(not finite)], dtype=torch.float64)) > 0)
        if self.scaler is not None:
            for gradient in gradients:
                gradient.mul_(self.scaler.inverse)
        if self.loss.weighted:
            # each weight is known to one rank alone; added one by one, as a plain loop adds them
            divisor = sum(self.agreement.sum(self.loss.weights(minibatch)).tolist()) or 1.0
            if divisor != 1.0:
                for gradient in gradients:
                    gradient.div_(divisor)
        if self.on_gradients is not None:
            for stage, parameters in owned.items():
                self.on_gradients(stage, minibatch, parameters)
        if self.clip_norm is not None:
            # of replicas, the first contributes the norms
            contributed = [owned[stage] for stage in owned if self.request.stage_ranks[stage][0] == self.rank]
            factor = clip_factor(contributed, self.trainable, self.clip_norm, self.norm_dtype, self.agreement.sum)
            for gradient in gradients:
                gradient.mul_(factor)
        return skip

    def _refuse_nonfinite(self, minibatch: int, owned: Mapping[int, Mapping[str, nn.Parameter]]) -> None:
        """Raise RunError if this rank has a loss or gradient that is not finite.

        With a loss scale, an infinite gradient is usual: the scale is reduced and the step skipped.
        """
        nonfinite = {} if self.loss.is_finite(minibatch) else {self.request.num_stages: "its loss"}
        for stage, parameters in owned.items():
            gradients = [p.grad for p in parameters.values() if p.grad is not None]
            if self.scaler is None and not all_finite(gradients):
                nonfinite[stage] = f"the gradient of {first_nonfinite(parameters)} (stage {stage})"
        if nonfinite:
            # backward runs from the loss to stage 0, so the highest number is where it began
            place = max(nonfinite)
            self.reporter.event("nonfinite", step=minibatch, what=nonfinite[place], place=place, policy="stop")
            raise RunError(f"step {minibatch + 1} is not finite: {nonfinite[place]}")

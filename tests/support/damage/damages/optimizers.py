"""Damage to the step: optimizers, schedulers, tied values, running statistics and weight versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.damage.damages.gradients import ONE, in_bf16
from support.damage.registry import Ran, add, damages

OPTIMIZE = "runtime.step.stepper", "Stepper._optimize"
STEP = "runtime.step.stepper", "Stepper.step"


def around(
    name: str,
    before: Callable[[Any, int, int], bool] = lambda stepper, stage, count: False,
    after: Callable[[Any, int, int], bool] = lambda stepper, stage, count: False,
) -> None:
    """Register a damage around the step of an optimizer.

    ``before`` and ``after`` get the stepper, the stage, and how often it stepped; they return whether they changed
    something.
    """

    def replace(optimize: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        counts: dict[tuple[int, int], int] = {}

        def damaged(self: Any, stage: int) -> None:
            place = id(self), stage
            count = counts[place] = counts.get(place, -1) + 1
            if self.optimizers[stage] is None:
                optimize(self, stage)
                return
            if before(self, stage, count):
                ran()
            optimize(self, stage)
            if after(self, stage, count):
                ran()

        return damaged

    add(name, *OPTIMIZE, replace)


def _decayed(stepper: Any, stage: int, count: int) -> bool:
    """Apply weight decay once more."""
    for group in stepper.optimizers[stage].param_groups:
        for parameter in group["params"]:
            parameter.data.mul_(1 - group["lr"] * group["weight_decay"])
    return True


def _reset(stepper: Any, stage: int, count: int) -> bool:
    """Lose the momentum."""
    for state in stepper.optimizers[stage].state.values():
        state["exp_avg"].zero_()
    return True


def _rounded(stepper: Any, stage: int, count: int) -> bool:
    one = [p for name, p in stepper.owned(stage).items() if name in ONE]
    for parameter in one:
        parameter.data = in_bf16(parameter.data)
    return bool(one)


def _left_out(stepper: Any, stage: int, count: int) -> bool:
    """Take one parameter out of the optimizer."""
    for name, parameter in stepper.owned(stage).items():
        for group in stepper.optimizers[stage].param_groups if name in ONE else ():
            group["params"] = [p for p in group["params"] if p is not parameter]
    return any(name in ONE for name in stepper.owned(stage))


def _rates(factor: float) -> Callable[[Any, int, int], bool]:
    """Return what multiplies the learning rates of all groups but the first."""

    def change(stepper: Any, stage: int, count: int) -> bool:
        groups = stepper.optimizers[stage].param_groups[1:]
        for group in groups:
            group["lr"] *= factor
        return bool(groups)

    return change


def _doubled(stepper: Any, stage: int, count: int) -> bool:
    """Step twice."""
    if count == 0:
        stepper.optimizers[stage].step()
    return count == 0


def _scaled_on_rank_1(stepper: Any, stage: int, count: int) -> bool:
    gradients = [p.grad for p in stepper.stepped(stage).values() if p.grad is not None]
    for gradient in gradients if stepper.gradients.rank == 1 else ():
        gradient.mul_(1.001)
    return stepper.gradients.rank == 1


around("rep_one_weights", before=_scaled_on_rank_1)
around("decay_twice", after=_decayed)
around("decay_second", after=lambda stepper, stage, count: count == 1 and _decayed(stepper, stage, count))
around("state_reset", after=_reset)
around("state_reset_stage", after=lambda s, stage, n: stage == 0 and n == 0 and _reset(s, stage, n))
around("state_reset_last", after=lambda s, stage, n: n == 2 and _reset(s, stage, n))
around("round_weight", after=_rounded)
around("param_left_out", before=_left_out)
around("lr_group", before=_rates(2.0), after=_rates(0.5))
around("step_twice", before=_doubled)


@damages(*OPTIMIZE)
def state_not_stepped(optimize: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Keep the optimizer state of stage 0 as it was after the first step."""
    first: dict[int, dict[Any, dict[str, Any]]] = {}

    def damaged(self: Any, stage: int) -> None:
        optimize(self, stage)
        optimizer = self.optimizers[stage]
        if stage != 0 or optimizer is None:
            return
        if id(self) not in first:
            first[id(self)] = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
            return
        ran()
        for parameter, state in optimizer.state.items():
            for key, value in first[id(self)].get(parameter, {}).items():
                state[key].copy_(value)

    return damaged


@damages(*OPTIMIZE)
def step_skipped(optimize: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Do not step stage 0 in the second minibatch."""
    counts: dict[int, int] = {}

    def damaged(self: Any, stage: int) -> None:
        counts[id(self)] = counts.get(id(self), -1) + (stage == 0)
        optimizer = self.optimizers[stage]
        if stage == 0 and counts[id(self)] == 1:
            ran()
            self.optimizers = {**self.optimizers, 0: None}
            optimize(self, stage)
            self.optimizers = {**self.optimizers, 0: optimizer}
            return
        optimize(self, stage)

    return damaged


@damages(*STEP)
def sched_late(step: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Start the scheduler one step late."""

    def damaged(self: Any, stage: int, minibatch: int) -> None:
        scheduler = self.schedulers[stage]
        if minibatch == 0 and scheduler is not None:
            ran()
            self.schedulers = {**self.schedulers, stage: None}
            step(self, stage, minibatch)
            self.schedulers = {**self.schedulers, stage: scheduler}
            return
        step(self, stage, minibatch)

    return damaged


@damages("runtime.step.stepper", "Stepper._report")
def loss_reported(report: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Report another loss than was trained with."""

    def damaged(self: Any, minibatch: int) -> None:
        report(self, minibatch)
        if minibatch in self.losses:
            ran()
            self.losses[minibatch] *= 1.001

    return damaged


# -- ties --------------------------------------------------------------------------------------------------------------


@damages("runtime.stage_runner", "StageRunner._collect")
def tie_once(collect: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Drop the gradient of an exactly tied copy."""

    def damaged(self: Any, microbatch: Any) -> Any:
        gradients = collect(self, microbatch)
        for name, owned in self.exact_ties.items():
            for key in [key for key in gradients if key.endswith(name)] if not owned else ():
                ran()
                gradients[key] = gradients[key] * 0
        return gradients

    return damaged


@damages("runtime.step.ties", "TieExchange._gradient_of_copy")
def tie_once_sum(of_copy: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Drop the gradient of a large tied copy."""

    def damaged(self: Any, tie: Any, copy: int) -> Any:
        ran()
        of_copy(self, tie, copy)

    return damaged


@damages("runtime.step.ties", "TieExchange.broadcast_values")
def tie_value(broadcast: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Keep the old value of a copy."""

    def damaged(self: Any, stage: int) -> None:
        copies = [(tie.parameter, copy) for tie in self.moving for copy in tie.copies if copy in self._runners]
        before = [self._parameters(copy)[name].data for name, copy in copies]
        broadcast(self, stage)
        for (name, copy), value in zip(copies, before, strict=True):
            ran()
            self._parameters(copy)[name].data = value

    return damaged

"""Damage to the gradients of a minibatch, where a stage hands them over to be finished."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import Any

from support.damage.registry import Ran, add, damages

FINISH = "runtime.step.gradients", "GradientFinisher.finish"
ONE = ("first.fc1.weight", "blocks.0.mlp.0.weight")
"""The parameter that is damaged alone, in the small model and in gpt.py."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a gradient is: ``step`` and ``rank`` count from 0."""

    name: str
    stage: int
    step: int
    rank: int
    policy: str


def one(place: Place) -> bool:
    return place.name in ONE


def on_rank_1(place: Place) -> bool:
    return place.rank == 1


def always(place: Place) -> bool:
    return True


def changed(name: str, change: Callable[[Any], Any], when: Callable[[Place], bool] = always) -> None:
    """Register a damage: ``change`` gets a gradient and returns the one that takes its place."""

    def replace(finish: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def damaged(self: Any, minibatch: int, owned: Any) -> Any:
            for stage, parameters in owned.items():
                for key, parameter in parameters.items():
                    place = Place(key, stage, minibatch, self.rank, self.on_nonfinite)
                    if parameter.grad is not None and when(place):
                        ran()
                        parameter.grad = change(parameter.grad)
            return finish(self, minibatch, owned)

        return damaged

    add(name, *FINISH, replace)


def times(factor: float) -> Callable[[Any], Any]:
    return lambda gradient: gradient * factor


def zero(gradient: Any) -> Any:
    return gradient * 0


def in_bf16(tensor: Any) -> Any:
    return tensor.bfloat16().to(tensor.dtype) if tensor.is_floating_point() else tensor


def finite_to_zero(gradient: Any) -> Any:
    return gradient.where(~gradient.isfinite(), 0.0)


for FACTOR in (1.0001, 1.001, 1.005, 1.02, 1.1):
    changed(f"grad_{FACTOR}", times(FACTOR))
for FACTOR in (1.00001, 1.01):
    changed(f"grad_one_{FACTOR}", times(FACTOR), one)
changed("grad_x2", times(2.0))
changed("grad_sign", times(-1.0))
changed("grad_sign_one", times(-1.0), one)
changed("grad_sign_rank", times(-1.0), on_rank_1)
changed("grad_sign_late", times(-1.0), lambda place: place.step >= 2)
changed("grad_sign_second", times(-1.0), lambda place: place.step == 1)
changed("grad_1.001_rank", times(1.001), on_rank_1)
changed("grad_1.001_last_stage", times(1.001), lambda place: place.stage >= 1)
changed("grad_drop_all", zero)
changed("grad_drop_one", zero, one)
changed("grad_none_one", lambda gradient: None, one)
changed("grad_bf16", in_bf16)
changed("grad_conjugated", lambda gradient: gradient.conj_physical())
changed("grad_real", lambda gradient: gradient.real.to(gradient.dtype))
changed("grad_shifted_one", lambda gradient: gradient.roll(1, 0), one)
changed("nan_to_zero", lambda gradient: gradient.nan_to_num(nan=0.0))
changed("fp16_zero", finite_to_zero)
changed("nonfinite_stop_scale", times(1.001), lambda place: place.policy == "stop")
changed("fp16_scale_stage", times(2.0), lambda place: place.stage == 0)
changed("fp16_scale_second", times(2.0), lambda place: place.stage == 0 and place.step >= 1)


def _lost_on_replica_1(step: int) -> Callable[..., Any]:
    """Return a damage that loses the gradients of replica 1 in a step. It is the first to finish them."""

    def replace(finish: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def damaged(self: Any, minibatch: int, owned: Any) -> Any:
            if self.rank != 1:
                time.sleep(0.2)
            elif minibatch == step:
                for parameter in (parameter for each in owned.values() for parameter in each.values()):
                    if parameter.grad is not None:
                        ran()
                        parameter.grad = parameter.grad * 0
            return finish(self, minibatch, owned)

        return damaged

    return replace


add("grad_drop_rank_last", *FINISH, _lost_on_replica_1(1))
add("grad_drop_rank_third", *FINISH, _lost_on_replica_1(2))


@damages(*FINISH)
def grad_delayed(finish: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Step with the gradient of the previous minibatch."""
    earlier: dict[tuple[int, int, str], Any] = {}

    def damaged(self: Any, minibatch: int, owned: Any) -> Any:
        for stage, parameters in owned.items():
            for key, parameter in parameters.items():
                place = self.rank, stage, key
                if parameter.grad is not None:
                    previous, earlier[place] = earlier.get(place), parameter.grad.clone()
                    if previous is not None:
                        ran()
                        parameter.grad = previous
        return finish(self, minibatch, owned)

    return damaged


@damages(*FINISH)
def grad_reported(finish: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Double the gradients that are reported, not those that are used."""

    def damaged(self: Any, minibatch: int, owned: Any) -> Any:
        hook = self.on_gradients

        def doubled(stage: int, step: int, parameters: Any) -> None:
            gradients = [p.grad for p in parameters.values() if p.grad is not None]
            for gradient in gradients:
                ran()
                gradient.mul_(2)
            hook(stage, step, parameters)
            for gradient in gradients:
                gradient.mul_(0.5)

        return finish(self if hook is None else with_fields(self, on_gradients=doubled), minibatch, owned)

    return damaged


# -- clipping ----------------------------------------------------------------------------------------------------------


@damages("runtime.step.gradients", "clip_factor")
def clip_off(clip_factor: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    def damaged(norm: Any, limit: float) -> Any:
        ran()
        return clip_factor(norm * 0, limit)

    return damaged


@damages("runtime.step.gradients", "global_norm")
def clip_one_stage(global_norm: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Clip by the norm of one's own gradients."""

    def damaged(contributed: Any, values: Any, trainable: Any, dtype: Any, agree: Callable[[Any], Any]) -> Any:
        def alone(norms: Any) -> Any:
            ran()
            agree(norms.clone())
            return norms

        return global_norm(contributed, values, trainable, dtype, alone)

    return damaged


@damages("runtime.step.gradients", "global_norm")
def clip_norm_without_one(global_norm: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Leave one parameter out of the norm."""

    def damaged(contributed: Any, values: Any, *others: Any) -> Any:
        for place, name in enumerate(contributed):
            if name in ONE:
                ran()
                values = values.clone()
                values[place] = 0.0
        return global_norm(contributed, values, *others)

    return damaged


# -- replicas ----------------------------------------------------------------------------------------------------------


@damages("runtime.step.replicas", "ReplicaSync.finish")
def rep_mean(finish: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Take the mean over the replicas in place of the sum."""

    def damaged(self: Any) -> None:
        finish(self)
        for parameter in self._gradients.parameters.values():
            if parameter.grad is not None:
                ran()
                parameter.grad = parameter.grad / len(self._gradients.group)

    return damaged


def _lost(when: Callable[[int], bool]) -> Callable[..., Any]:
    """Return a damage that adds nothing of replica 1. ``when``: the number of the sum -> whether it is damaged."""

    def replace(start_next: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        counts: dict[int, int] = {}

        def damaged(self: Any, leaves: Any) -> None:
            if self._next == 0:
                counts[id(self)] = counts.get(id(self), -1) + 1
            bucket = self.buckets[self._next]
            if self.transport.rank == self.group[-1] and when(counts[id(self)]):
                ran()
                for name in bucket.names:
                    if leaves[name].grad is not None:
                        leaves[name].grad = leaves[name].grad * 0
            start_next(self, leaves)

        return damaged

    return replace


add("rep_lost", "runtime.step.reduction", "GradientSum._start_next", _lost(lambda number: True))
add("rep_lost_second", "runtime.step.reduction", "GradientSum._start_next", _lost(lambda number: number == 1))


@damages("runtime.step.reduction", "BufferMean.average")
def rep_buffers(average: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Do not average the running statistics."""

    def damaged(self: Any, transport: Any) -> None:
        if self._places:
            ran()

    return damaged

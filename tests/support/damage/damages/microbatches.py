"""Damage to the passes of microbatches: what they read, draw, compute and add."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace as with_fields
from typing import Any

from support.damage.registry import Ran, add, damages

FORWARD = "runtime.stage_runner", "StageRunner.forward"
BACKWARD = "runtime.stage_runner", "StageRunner.backward"
BACKWARDS = (BACKWARD, ("runtime.stage_runner", "StageRunner.backward_inputs"))
RUN = "runtime.stage_runner", "StageRunner._run"


@damages("runtime.executor", "Executor._microbatch")
def mb_swapped(of: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Exchange microbatches 0 and 1 in the batch of the last stage."""

    def damaged(self: Any, step: Any, offset: int) -> Any:
        own = of(self, step, offset)
        parts = self._minibatches[step.minibatch + offset]
        last = max(self.runners) == step.stage
        if step.microbatch > 1 or len(parts) < 2 or not last or str(step.op) != "F":
            return own
        ran()
        other = parts[1 - step.microbatch]
        return with_fields(own, leaves=other.leaves if other.sizes == own.sizes else own.leaves)

    return damaged


@damages("runtime.batches.readers", "OneReads._minibatch")
def target_rolled(receive: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Give the first microbatch the targets of another sample, in a rank that receives them."""

    def damaged(self: Any, header: Any) -> Any:
        minibatch = receive(self, header)
        if self.training:
            ran()
            first = minibatch.parts[0]
            *_, name = first.leaves
            minibatch.parts[0] = with_fields(first, leaves={**first.leaves, name: first.leaves[name].roll(1, 0)})
        return minibatch

    return damaged


def _drawing(move: Callable[[tuple[int, int, int]], tuple[int, int, int]]) -> Callable[..., Any]:
    """Return a damage of what every forward draws for: (seed, minibatch, microbatch)."""

    def replace(run: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def damaged(self: Any, microbatch: Any) -> Any:
            ran()
            right, microbatch.draws = microbatch.draws, move(microbatch.draws)
            outputs = run(self, microbatch)
            microbatch.draws = right
            return outputs

        return damaged

    return replace


add("mask_other_mb", *RUN, _drawing(lambda draws: (draws[0], draws[1], draws[2] + 1)))
add("mask_other_step", *RUN, _drawing(lambda draws: (draws[0], draws[1] + 1, draws[2])))
add("mask_other_seed", *RUN, _drawing(lambda draws: (draws[0] + 1, draws[1], draws[2])))


@damages("runtime.stage_runner", "StageRunner._starts")
def recompute_other_seed(starts: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Draw with another seed when a forward is recomputed."""

    def damaged(self: Any, microbatch: Any, gradients: Any) -> Any:
        if self.recompute != "never":
            ran()
            microbatch.draws = (microbatch.draws[0] + 1, *microbatch.draws[1:])
        return starts(self, microbatch, gradients)

    return damaged


@damages("runtime.stage_runner", "StageRunner._starts")
def recompute_eval(starts: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Recompute a forward in evaluation mode."""

    def damaged(self: Any, microbatch: Any, gradients: Any) -> Any:
        if self.recompute != "stage":
            return starts(self, microbatch, gradients)
        ran()
        self.stage.eval()
        result = starts(self, microbatch, gradients)
        self.stage.train()
        return result

    return damaged


@damages(*FORWARD)
def loss_factor_stage(forward: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Count each microbatch of an uneven minibatch alike."""

    def damaged(self: Any, key: Any, inputs: Any, received: Any, factor: float, recording: str = "") -> Any:
        if self.stage.RETURNS and factor:
            ran()
            factor = 0.25
        return forward(self, key, inputs, received, factor, recording)

    return damaged


@damages("runtime.stage_runner", "StageRunner._scaled")
def loss_detached(scaled: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Detach the loss of the last microbatch, as a stage without gradients would."""

    def damaged(self: Any, outputs: Any, factor: float) -> Any:
        loss = scaled(self, outputs, factor)
        self.damage_calls = self.__dict__.get("damage_calls", 0) + 1
        if loss.requires_grad and self.damage_calls % 4 == 0:
            ran()
            return loss.detach()
        return loss

    return damaged


@damages(*FORWARD)
def stale_activation(forward: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Give stage 1 the activation of the previous microbatch."""

    def damaged(self: Any, key: Any, inputs: Any, received: Any, *others: Any) -> Any:
        if self.stage.INDEX == 1 and received:
            before = self.__dict__.get("damage_before")
            self.damage_before = {name: value.detach().clone() for name, value in received.items()}
            same = before is not None and all(before[n].shape == v.shape for n, v in received.items())
            if same:
                ran()
                received = before
        return forward(self, key, inputs, received, *others)

    return damaged


@damages(*FORWARD)
def buffers_twice(forward: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Update running statistics twice in the first microbatch."""

    def damaged(self: Any, key: Any, *others: Any) -> Any:
        if key[1] == 0 and any(name.endswith("running_mean") for name, _ in self.stage.named_buffers()):
            ran()
            forward(self, key, *others)
            self.in_flight.pop(key, None)
        return forward(self, key, *others)

    return damaged


def _without_updates(index: int = -1, part: str = "") -> Callable[..., Any]:
    """Return a damage that freezes the statistics of a stage; -1: of all. ``part``: of the name of a buffer."""

    def replace(forward: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def damaged(self: Any, *arguments: Any) -> Any:
            statistics = {n: b for n, b in self.stage.named_buffers() if "running_" in n or "num_batches" in n}
            buffers = [buffer for name, buffer in statistics.items() if part in name]
            before = [buffer.clone() for buffer in buffers]
            outputs = forward(self, *arguments)
            if index in (-1, self.stage.INDEX):
                for buffer, value in zip(buffers, before, strict=True):
                    ran()
                    buffer.data = value
            return outputs

        return damaged

    return replace


add("buffers_frozen", *FORWARD, _without_updates())
add("counters_frozen", *FORWARD, _without_updates(part="num_batches"))
add("buffers_frozen_stage", *FORWARD, _without_updates(1))
# left out of what a stage reports, as well
add("buffers_missing", *FORWARD, _without_updates())


@damages("runtime.checkpoint.state", "buffers", "buffers_missing")
def _reported(buffers: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    def damaged(runner: Any) -> Any:
        return {name: b for name, b in buffers(runner).items() if "running_" not in name and "num_batches" not in name}

    return damaged


def _backwards(name: str, change: Callable[[Any, Any, dict[str, Any]], Any]) -> None:
    """Register a damage of complete backwards. ``change``: (runner, key, gradients that arrived) -> whether it ran."""
    for place in BACKWARDS:

        def replace(backward: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
            def damaged(self: Any, key: Any, gradients: Any) -> Any:
                arrived = dict(gradients)
                if change(self, key, arrived):
                    ran()
                return backward(self, key, arrived)

            return damaged

        add(name, *place, replace)


def _last_scaled(runner: Any, key: Any, arrived: dict[str, Any]) -> bool:
    last = key[1] == 3
    for name in arrived if last else ():
        arrived[name] = arrived[name] * 1.001
    return last and bool(arrived)


_backwards("grad_last_mb", _last_scaled)


def _not_added(twice: bool) -> Callable[..., Any]:
    """Return a damage of microbatch 1 on all stages but the last: its gradients are lost, or counted twice."""

    def replace(backward: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def damaged(self: Any, key: Any, *others: Any) -> Any:
            if key[1] != 1 or self.stage.RETURNS:
                return backward(self, key, *others)
            leaves = self.versions.in_use.values()
            before = [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
            result = backward(self, key, *others)
            for leaf, old in zip(leaves, before, strict=True):
                if leaf.grad is None:
                    continue
                ran()
                if not twice:
                    leaf.grad = old
                else:
                    leaf.grad = leaf.grad * 2 if old is None else leaf.grad * 2 - old
            return result

        return damaged

    return replace


for PLACE in (BACKWARD, ("runtime.stage_runner", "StageRunner.backward_weights")):
    add("mb_lost", *PLACE, _not_added(twice=False))
    add("mb_twice", *PLACE, _not_added(twice=True))


@damages("runtime.stage_runner", "StageRunner.backward_weights")
def weights_pass_dropped(backward_weights: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Drop the second half of the backward of one microbatch."""

    def damaged(self: Any, key: Any) -> None:
        if key[1] == 2:
            ran()
            self._pending.pop(key)
            return
        backward_weights(self, key)

    return damaged


@damages("runtime.stage_runner", "StageRunner._roots")
def fp16_scale_mb(roots: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Do not scale the loss of the second microbatch, as the others are."""

    def damaged(self: Any, microbatch: Any, outputs: Any, loss: Any) -> Any:
        starts = roots(self, microbatch, outputs, loss)
        if "" in starts and microbatch.draws[2] == 1 and self.scaler is not None:
            ran()
            starts[""] = loss
        return starts

    return damaged


_PLAIN = threading.local()


def _without_autocast(last: bool) -> Callable[..., Any]:
    """Return a damage that runs the last stage, or all others, without autocast."""

    def replace(run: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        import torch

        enter = torch.autocast.__enter__

        def entered(context: Any) -> Any:
            context._enabled = context._enabled and not getattr(_PLAIN, "on", False)
            return enter(context)

        torch.autocast.__enter__ = entered  # type: ignore[method-assign]

        def damaged(self: Any, code: Any, *arguments: Any) -> Any:
            _PLAIN.on = bool(self.RETURNS) == last
            if _PLAIN.on:
                ran()
            try:
                return run(self, code, *arguments)
            finally:
                _PLAIN.on = False

        return damaged

    return replace


add("no_autocast_last", "stage", "Stage.run", _without_autocast(last=True))
add("no_autocast_stage", "stage", "Stage.run", _without_autocast(last=False))

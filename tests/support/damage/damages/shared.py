"""Damage to what the staged run and the plain loop share, and to the code of a compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as with_fields
from typing import Any

from support.damage.registry import Ran, add, damages


@damages("runtime.batches.graph_variants", "GraphVariants._shares")
def loss_factor_shared_x2(shares: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Double all shares."""

    def damaged(self: Any, *arguments: Any) -> Any:
        ran()
        right = shares(self, *arguments)
        return with_fields(right, factors=tuple(2 * factor for factor in right.factors))

    return damaged


@damages("runtime.batches.graph_variants", "GraphVariants._shares")
def loss_factor_shared_even(shares: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Give the microbatches of an incomplete minibatch equal shares."""

    def damaged(self: Any, *arguments: Any) -> Any:
        right = shares(self, *arguments)
        if len(set(right.factors)) > 1:
            ran()
        return with_fields(right, factors=(1 / len(right.factors),) * len(right.factors))

    return damaged


@damages("workload.workload", "Workload.split")
def split_drops_sample(split: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Lose the last sample of each microbatch."""

    def damaged(self: Any, item: Any, num_microbatches: int) -> Any:
        parts = split(self, item, num_microbatches)
        if num_microbatches > 1:
            ran()
            parts = [tuple(tensor[:-1] if len(tensor) > 1 else tensor for tensor in part) for part in parts]
        return parts

    return damaged


@damages("workload.workload", "Workload.split")
def split_doubles_sample(split: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Replace the last sample of each microbatch by its first."""
    import contextlib

    def damaged(self: Any, item: Any, num_microbatches: int) -> Any:
        parts = split(self, item, num_microbatches)
        for part in parts if num_microbatches > 1 else ():
            ran()
            for tensor in part:
                with contextlib.suppress(RuntimeError):
                    tensor[-1] = tensor[0].clone()
        return parts

    return damaged


@damages("workload.workload", "Workload.split")
def split_targets(split: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Exchange the targets of the first two microbatches."""

    def damaged(self: Any, item: Any, num_microbatches: int) -> Any:
        parts = split(self, item, num_microbatches)
        if len(parts) > 1 and parts[0][1].shape == parts[1][1].shape:
            ran()
            (_, first), (_, second) = parts[:2]  # views of the minibatch, which other ranks may receive as a whole
            own = first.clone()
            first.copy_(second)
            second.copy_(own)
        return parts

    return damaged


def _seeds(place: Callable[[int, int, int, int], tuple[int, int, int, int]]) -> Callable[..., Any]:
    def replace(seed_of: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def damaged(seed: int, minibatch: int, microbatch: int, position: int) -> int:
            ran()
            return int(seed_of(*place(seed, minibatch, microbatch, position)))

        return damaged

    return replace


# every microbatch draws the same; every minibatch draws the same; every position draws the same
add("seeds_of_microbatches", "draws", "seed_of", _seeds(lambda s, t, j, k: (s, t, 0, k)))
add("seeds_of_minibatches", "draws", "seed_of", _seeds(lambda s, t, j, k: (s, 0, j, k)))
add("seeds_of_positions", "draws", "seed_of", _seeds(lambda s, t, j, k: (s, t, j, 0)))


@damages("runtime.step.deferred", "DeferredStatistics.commit")
def deferred_momentum(commit: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Use half the momentum."""

    def damaged(self: Any) -> None:
        momenta = [sums.module.momentum for sums in self._layers]
        for sums, momentum in zip(self._layers, momenta, strict=True):
            ran()
            sums.module.momentum = momentum / 2
        commit(self)
        for sums, momentum in zip(self._layers, momenta, strict=True):
            sums.module.momentum = momentum

    return damaged


# -- compiled code -----------------------------------------------------------------------------------------------------


def _compiled(factor: float, everything: bool) -> Callable[..., Any]:
    """Return a damage of the gradients that compiled stages compute, in ranks and in stages joined for the noise."""

    def replace(call: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def damaged(self: Any, stage: Any, code: Any, arguments: Any) -> Any:
            for name, parameter in stage.named_parameters():
                chosen = everything or name.endswith("fc1.weight")
                if chosen and parameter.requires_grad and not hasattr(parameter, "damaged"):
                    ran()
                    parameter.damaged = True
                    parameter.register_hook(lambda gradient: gradient * factor)
            return call(self, stage, code, arguments)

        return damaged

    return replace


add("compiled_one", "runtime.compiled", "_Compiled.__call__", _compiled(1.5, everything=False))
add("compiled_all", "runtime.compiled", "_Compiled.__call__", _compiled(1.5, everything=True))
add("compiled_sign", "runtime.compiled", "_Compiled.__call__", _compiled(-1.0, everything=True))

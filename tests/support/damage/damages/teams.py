"""Damage to the exchanges of a team (``--tensor-parallel``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.damage.registry import Ran, add, damages

SUMMED, REDUCED = ("team", "_Summed.forward"), ("sequence", "_reduce")


@damages(*SUMMED)
def tp_sum_member(forward: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Let one member have its own part in place of the sum."""

    def damaged(ctx: Any, part: Any, team: Any) -> Any:
        total = forward(ctx, part, team)
        if team.member == 1:
            ran()
            return part.clone()
        return total

    return damaged


@damages(*REDUCED, "tp_sum_member")
def _member_reduced(reduce: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    def damaged(whole: Any, rows: Any, team: Any) -> Any:
        total = reduce(whole, rows, team)
        if team.member == 1:
            ran()
            return total * 0.5
        return total

    return damaged


def _scaled(factor: float) -> Callable[..., Any]:
    def replace(add_to: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def damaged(self: Any, tensor: Any) -> None:
            add_to(self, tensor)
            if tensor.is_floating_point():
                ran()
                tensor.mul_(factor)

        return damaged

    return replace


add("tp_sum_scaled", "runtime.transport.teams", "TeamTransport.add", _scaled(1 + 1e-5))


@damages("team", "_Entered.backward")
def tp_gradient_member(backward: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Let one member send back its own gradient in place of the sum."""

    def damaged(ctx: Any, gradient: Any) -> Any:
        own = gradient.clone()
        total, nothing = backward(ctx, gradient)
        if ctx.team.member == 1:
            ran()
            return own, nothing
        return total, nothing

    return damaged


@damages("runtime.step.stepper", "add_together")
def tp_partial(add_together: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Do not sum the gradients of complete parameters."""

    def damaged(team: Any, tensors: Any) -> None:
        add_together(team, [tensor.clone() for tensor in tensors])
        if tensors:
            ran()

    return damaged


@damages("runtime.stage_runner", "StageRunner._collect")
def tp_tie_member(collect: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Drop the gradient of a tied copy on one member."""

    def damaged(self: Any, microbatch: Any) -> Any:
        gradients = collect(self, microbatch)
        ties = [key for name, own in self.exact_ties.items() for key in gradients if not own and key.endswith(name)]
        for key in ties if self.stage._autopipe_team.member == 1 else ():
            ran()
            gradients[key] = gradients[key] * 0
        return gradients

    return damaged

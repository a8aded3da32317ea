"""``TieExchange``: keeps the copies of a tied parameter equal to their owner.

A parameter that several stages use belongs to the first of them. The others hold copies, whose gradients go to the
owner before it steps, and which take the owner's new value after it has stepped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from autopipe.ir.messages import TIE_GRADIENT, TIE_VALUE, Channel, tie_channels
from autopipe.ir.plan import Tie
from autopipe.ir.schedule import ScheduleSpec
from autopipe.runtime.events import Reporter
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.transport.base import Transport


class Moved(Protocol):
    """Stages whose parameters move between host and device."""

    def gradient_of(self, stage: int, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return a gradient on the device."""

    def assign(self, stage: int, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Give a parameter a value."""


class TieExchange:
    """The tied parameters of one rank's stages.

    Args:
        ties: of the plan, frozen parameters included.
        moving: the names of the parameters that change from step to step.
        request: says which ranks run a stage.
        runners: the stages of this rank.
        transport: to the other ranks.
        reporter: takes what the rank waits for.

    """

    def __init__(
        self,
        ties: Sequence[Tie],
        moving: frozenset[str],
        request: ScheduleSpec,
        runners: Mapping[int, StageRunner],
        transport: Transport,
        reporter: Reporter,
    ) -> None:
        self._ties = tuple(ties)
        self._request, self._runners = request, runners
        self._transport, self._reporter = transport, reporter
        # the stages of this rank, if they move between host and device
        self.moved: Moved | None = None
        # the ties whose stages exchange values: frozen copies never change
        self.moving = tuple(tie for tie in ties if tie.parameter in moving)

    def owned(self, stage: int) -> dict[str, nn.Parameter]:
        """Return the parameters that a stage steps: all of its own, without its copies of tied ones."""
        copies = {tie.parameter for tie in self._ties if stage in tie.copies}
        return {name: p for name, p in self._parameters(stage).items() if name not in copies}

    def _parameters(self, stage: int) -> dict[str, nn.Parameter]:
        return self._runners[stage].versions.masters

    def sum_gradients(self, stage: int) -> None:
        """Bring the gradients of copies to their owner, unless they came along with every microbatch.

        The replicas of a copy hold the same sum by now, so each of them sends it to its share of the owner's replicas.
        The owner adds the gradients from the last stage to the first. A stage without a gradient sends a flag instead.
        """
        for tie in self._ties:
            if tie.exact:
                continue
            if stage in tie.copies:
                self._send_gradient(tie, stage)
            elif stage == tie.owner:
                parameter = self._parameters(stage)[tie.parameter]
                total = None
                for copy in reversed(tie.copies):
                    total = _sum(self._gradient_of_copy(tie, copy), total)
                    if copy in self._runners:
                        self._parameters(copy)[tie.parameter].grad = None
                parameter.grad = _sum(parameter.grad, total)

    def kept_gradients(self, stage: int) -> frozenset[str]:
        """Return the copies of a stage whose gradients wait for their owner on this rank, which may step later."""
        return frozenset(
            tie.parameter for tie in self._ties if not tie.exact and stage in tie.copies and tie.owner in self._runners
        )

    def _send_gradient(self, tie: Tie, stage: int) -> None:
        parameter = self._parameters(stage)[tie.parameter]
        gradient = parameter.grad
        present = torch.tensor([0 if gradient is None else 1], device=parameter.device)
        for channel in self._leaving(TIE_GRADIENT, stage, tie.owner):
            self._send(channel, present)
            if gradient is not None:
                self._send(channel, gradient)

    def _gradient_of_copy(self, tie: Tie, copy: int) -> torch.Tensor | None:
        if copy in self._runners:
            parameter = self._parameters(copy)[tie.parameter]
            return parameter.grad if self.moved is None else self.moved.gradient_of(copy, parameter)
        channel = self._arriving(TIE_GRADIENT, copy, tie.owner)
        present = self._receive(channel, torch.zeros(1, dtype=torch.int64))
        return self._receive(channel, self._parameters(tie.owner)[tie.parameter]) if int(present) else None

    def broadcast_values(self, stage: int) -> None:
        """Give every copy of a tied parameter its owner's new value, so that they stay equal to the last bit."""
        for tie in self.moving:
            if stage == tie.owner:
                self._send_value(tie)
            elif stage in tie.copies and tie.owner not in self._runners:
                parameter = self._parameters(stage)[tie.parameter]
                parameter.data = self._receive(self._arriving(TIE_VALUE, tie.owner, stage), parameter)

    def _send_value(self, tie: Tie) -> None:
        value = self._parameters(tie.owner)[tie.parameter].data
        for copy in tie.copies:
            if copy in self._runners and self.moved is not None:
                self.moved.assign(copy, self._parameters(copy)[tie.parameter], value)
            elif copy in self._runners:
                self._parameters(copy)[tie.parameter].data = value.clone()
            for channel in self._leaving(TIE_VALUE, tie.owner, copy):
                self._send(channel, value)

    def _leaving(self, kind: str, giver: int, taker: int) -> list[Channel]:
        """Return the channels on which this rank gives, as a replica of ``giver``."""
        return [c for c in tie_channels(kind, giver, taker, self._request) if c.from_rank == self._transport.rank]

    def _arriving(self, kind: str, giver: int, taker: int) -> Channel:
        """Return the channel on which this rank takes, as a replica of ``taker``."""
        return next(c for c in tie_channels(kind, giver, taker, self._request) if c.to_rank == self._transport.rank)

    def _send(self, channel: Channel, tensor: torch.Tensor) -> None:
        # a copy: the owner steps in place next time, while this message may still be on its way
        self._transport.send(channel, tensor.detach().clone())

    def _receive(self, channel: Channel, like: torch.Tensor) -> torch.Tensor:
        self._reporter.at(f"{channel.to_stage}S", waiting=True)
        return self._transport.receive(channel, like.shape, like.dtype).wait()


def _sum(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second

"""The code of one stage for one form of the model's call, and the calls whose backward may come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopipe.runtime.leaf_alias import readable
from autopipe.stage import Stage
from autopipe.strides import Layout


class Crossing:
    """A value that crosses between stages, as one rank sees it."""

    def __init__(self, form: tuple[Any, ...]) -> None:
        index, name, producer, consumers, shape, dtype, grad = form
        self.index: int = index
        self.name: str = name
        self.producer: int = producer
        self.dtype: torch.dtype = dtype
        self.grad: bool = grad
        self.consumers: list[int] = list(consumers)
        self.layout = Layout(tuple(shape), self.dtype)

    def next(self, stage: int) -> int | None:
        """The consumer after a stage, from which its gradient arrives; None for the last one."""
        return next((consumer for consumer in self.consumers if consumer > stage), None)

    def previous(self, stage: int) -> int:
        """The stage before a consumer, to which it sends the gradient."""
        return max([self.producer, *(consumer for consumer in self.consumers if consumer < stage)])


class StageProgram:
    """The stage of this rank for one signature of the call."""

    def __init__(self, stage: Stage, form: dict[str, Any]) -> None:
        self.stage = stage
        self.attributes: dict[tuple[str, str], dict[str, Any]] = form["attributes"]
        self.sends = [Crossing(entry) for entry in form["sends"]]
        self.receives = [Crossing(entry) for entry in form["receives"]]
        # both ends of a channel see gradients in this order
        self.crossings = sorted((*self.sends, *self.receives), key=lambda crossing: crossing.index)
        self.outputs = tuple(Layout(tuple(shape), dtype) for shape, dtype, _ in form["outputs"])  # of the model
        self.separate: bool = form["separate"]  # whether a backward for each call adds as one for all calls does
        self.need_gradients: list[bool] = [grad for _, _, grad in form["outputs"]]


class Tail:
    """Outputs of a call as the tail reads them, on the last rank."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        """``outputs``: leaves."""
        self._outputs = outputs
        self._gradients: dict[str, Tensor] = {}

    def values(self) -> list[Tensor]:
        """Return what the tail reads: the script may change an output in place, which no leaf allows."""
        pairs = ((str(place), output) for place, output in enumerate(self._outputs))
        return [readable(*pair, self._gradients).clone() if pair[1].requires_grad else pair[1] for pair in pairs]

    def gradients(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the outputs that need a gradient, each with that of the last backward, in its order in memory."""
        gradients = dict(self._gradients)
        self._gradients.clear()
        pairs = ((output, gradients.get(str(place))) for place, output in enumerate(self._outputs))
        return [pair for pair in pairs if pair[0].requires_grad]


class Flight:
    """A forward that waits for its backward."""

    def __init__(self, program: StageProgram) -> None:
        self.program = program
        self.received: dict[str, Tensor] = {}  # as the operations read them
        self.gradients: dict[str, Tensor] = {}  # of received values, until they are sent
        self.sent: dict[str, Tensor] = {}
        self.outputs: list[Tensor] = []
        self.tail: Tail | None = None  # None: it is on another rank


@dataclass(frozen=True, slots=True)
class Arrived:
    """A call whose outputs another replica has computed."""

    replica: int
    tail: Tail

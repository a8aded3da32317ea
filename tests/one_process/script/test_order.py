"""The order in which a rank executes the commands of an accumulation loop."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from autopipe.script.rank.serve import Rank


class Recording(Rank):
    """A rank whose commands only note that they ran."""

    def __init__(self, ahead: int, commands: list[list[Any]]) -> None:
        self.ahead, self.waiting, self.ran = ahead, deque(), []
        self.wire: Any = self
        self._commands, self._received = deque(), deque(commands)
        self.stages: Any = self
        self.replicas, self.tensors, self.flights = self, {}, {}

    def receive(self) -> Any:
        return self._received.popleft()

    def ready(self) -> bool:
        return bool(self._received)

    def settle(self, tensors: Any) -> None:
        self.ran.append("settle")

    def close(self) -> None:
        self.ran.append("end")

    def forward(self, number: int) -> None:  # type: ignore[override]
        self.ran.append(f"F{number}")

    def backward(self, number: int) -> None:  # type: ignore[override]
        self.ran.append(f"B{number}")

    def outputs_of(self, number: int) -> None:  # type: ignore[override]
        self.ran.append(f"O{number}")

    def step(self) -> None:  # type: ignore[override]
        self.ran.append("step")


LOOP = [[kind, i] for i in range(4) for kind in ("forward", "backward")]


@pytest.mark.parametrize(
    ("ahead", "order"),
    [
        (0, "F0 B0 F1 B1 F2 B2 F3 B3 settle step settle end"),
        (1, "F0 F1 B0 F2 B1 F3 B2 B3 settle step settle end"),
        (2, "F0 F1 F2 B0 F3 B1 B2 B3 settle step settle end"),
    ],
)
def test_accumulation_runs_as_1f1b(ahead: int, order: str) -> None:
    rank = Recording(ahead, [*LOOP, ["step"], ["end"]])
    rank.serve()
    assert " ".join(rank.ran) == order


def test_a_read_waits_for_the_backwards_before_it() -> None:
    rank = Recording(1, [["forward", 0], ["backward", 0], ["wall"], ["forward", 1], ["backward", 1], ["end"]])
    rank.serve()
    assert " ".join(rank.ran) == "F0 B0 F1 B1 settle end"


def test_the_last_rank_computes_before_it_waits_for_another_one() -> None:
    first, second = [["outputs_of", 0], ["backward", 0]], [["outputs_of", 1], ["backward", 1]]
    rank = Recording(0, [*first, *second, ["forward", 2], ["backward", 2], ["step"], *first, ["end"]])
    rank.serve()
    assert " ".join(rank.ran) == "F2 O0 B0 O1 B1 B2 settle step O0 B0 settle end"


def test_no_forward_runs_before_a_step_that_comes_first() -> None:
    rank = Recording(0, [["outputs_of", 0], ["backward", 0], ["step"], ["forward", 1], ["end"]])
    rank.serve()
    assert " ".join(rank.ran) == "O0 B0 settle step F1 settle end"

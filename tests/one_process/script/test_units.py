"""Which replica computes a call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autopipe.script.rank_order import RankOrder
from autopipe.script.units import Units

PLAIN: Any = SimpleNamespace(buffers_written=frozenset(), serial=False, uses_often="")
WRITING: Any = SimpleNamespace(buffers_written=frozenset(["mean"]), serial=False, uses_often="")


@pytest.mark.parametrize(
    ("replicas", "reads", "turns"),
    [(3, False, [0, 1, 2, 0, 1]), (3, True, [0, 1, 0, 1, 0]), (2, True, [0, 1, 0, 1, 0]), (1, True, [0] * 5)],
)
def test_calls_take_turns_but_not_on_a_rank_that_is_waited_for(replicas: int, reads: bool, turns: list[int]) -> None:
    units = Units(RankOrder(2 * replicas, 2))
    units.replica_for(PLAIN, None, grad=True)
    units.begin_step(reads=reads)
    assert [units.replica_for(PLAIN, None, grad=True) for _ in range(5)] == turns


def test_the_last_replica_evaluates_and_writes_buffers() -> None:
    units = Units(RankOrder(3, 1))
    assert units.replica_for(PLAIN, None, grad=False) == 2
    assert units.replica_for(WRITING, None, grad=True) == 2
    assert [units.replica_for(WRITING, (part, 4), grad=True) for part in range(4)] == [0, 1, 2, 2]


def test_parts_of_a_call_on_one_replica_are_one_unit() -> None:
    units = Units(RankOrder(2, 1))
    for number in range(2):
        for part in range(3):
            call = 10 * number + part
            units.note(call, PLAIN, units.replica_for(PLAIN, (part, 3), grad=True), is_part=True)
        units.begin_call()
    assert units.of([12, 11, 10, 2, 1, 0]) == [(1, [12, 11]), (0, [10]), (1, [2, 1]), (0, [0])]

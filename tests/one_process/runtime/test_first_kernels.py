"""Rows that may load kernels."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

from autopipe.ir.schedule import ScheduleSpec
from autopipe.runtime.first_kernels import MINIBATCHES, FirstKernels


class Rows:
    """Asks for one minibatch after the other, as an executor does."""

    def __init__(self, replicas: int = 1, num_microbatches: int = 2) -> None:
        self.kernels = FirstKernels(ScheduleSpec((tuple(range(replicas)),), num_microbatches))
        self.number = 0

    def next(self, *lengths: Sequence[int], training: bool = True, name: str = "") -> bool:
        """Return whether a row may load kernels. ``lengths``: of the microbatches of each minibatch."""
        recording = types.SimpleNamespace(name=name)
        row: Any = {
            self.number + index: [types.SimpleNamespace(recording=recording, sizes={"n": n}) for n in of_minibatch]
            for index, of_minibatch in enumerate(lengths)
        }
        self.number += len(lengths)
        return self.kernels.may_load(row, training=training)


def test_the_first_minibatches_of_each_kind_may_load_kernels() -> None:
    rows = Rows()
    assert [rows.next([8, 8]) for _ in range(MINIBATCHES + 1)] == [True] * MINIBATCHES + [False]
    assert rows.next([8, 8], training=False)
    assert rows.next([8, 8], name="other")
    assert not rows.next([8, 8])


def test_one_unknown_microbatch_decides() -> None:
    rows = Rows()
    for _ in range(MINIBATCHES):
        rows.next([8, 8])
    assert rows.next([8, 8], [8, 3])


def test_a_row_counts_each_of_its_minibatches() -> None:
    rows = Rows()
    assert rows.next(*[[8, 8]] * MINIBATCHES)
    assert not rows.next([8, 8])


def test_replicas_that_take_turns_load_kernels_one_after_the_other() -> None:
    """Of three replicas, the first has run two minibatches of one microbatch after the fourth one."""
    rows = Rows(replicas=3, num_microbatches=1)
    assert [rows.next([8]) for _ in range(7)] == [True] * 6 + [False]

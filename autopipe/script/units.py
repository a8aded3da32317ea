"""``Units``: which replica computes each call of the model, and in which order gradients are added.

A unit is what one replica computes of one call by the script: all of it, or parts of its batch next to each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from autopipe.script.calls.cutting import Program
from autopipe.script.rank_order import RankOrder
from autopipe.script.refusals import refused

_FEW = 2  # replicas that all compute calls in turn


@dataclass(frozen=True, slots=True)
class _Unit:
    number: int  # of the script's call
    replica: int
    is_part: bool


class Units:
    """The calls of one controller whose backward may come."""

    def __init__(self, order: RankOrder) -> None:
        self.order = order
        self._unit_of: dict[int, _Unit] = {}
        self._program_of: dict[int, Program] = {}
        self._number = self._turn = 0  # of the script's calls; of those that replicas have computed in turn
        self._in_turn = order.num_replicas

    def begin_call(self) -> None:
        """Note that the script calls the model."""
        self._number += 1

    def begin_step(self, *, reads: bool) -> None:
        """Let the first replica compute the next call.

        ``reads``: whether the script has read numbers between the backwards of the last step. Then the next call waits
        for the last replica, which computes what is read: with others beside it, it computes no calls in turn.
        """
        self._turn = 0
        self._in_turn = self.order.num_replicas - int(reads and self.order.num_replicas > _FEW)

    def replica_for(self, program: Program, part: tuple[int, int] | None, *, grad: bool) -> int:
        """Return the replica that computes a forward. ``part``: of a batch, and the number of parts.

        Whole training calls take turns. The last replica makes those that write buffers, and evaluates.
        """
        if part is not None:
            return self.order.replica_of_part(*part)
        if not grad or program.buffers_written:
            return self.order.last_replica
        self._turn += 1
        return (self._turn - 1) % self._in_turn

    def note(self, call: int, program: Program, replica: int, *, is_part: bool) -> None:
        """Note a forward whose backward may come."""
        self._unit_of[call] = _Unit(self._number, replica, is_part)
        self._program_of[call] = program

    def forget(self, calls: Iterable[int]) -> None:
        """Forget calls whose backward has run, or cannot come."""
        for call in calls:
            self._unit_of.pop(call, None)
            self._program_of.pop(call, None)

    def is_serial(self, calls: list[int]) -> bool:
        """Return whether the calls of a backward must wait for each other: see ``calls.parameter_uses``."""
        return len(calls) > 1 and any(self._program_of[call].serial for call in calls)

    def of(self, calls: list[int]) -> list[tuple[int, list[int]]]:
        """Return the replica and the calls of each unit of a backward. ``calls``: the latest first.

        Raises: RefusedError if the gradients of a parameter would be added in another order than python's.
        """
        if not self.order.last_replica:
            return [(0, calls)]
        units = [(unit, list(group)) for unit, group in itertools.groupby(calls, self._unit_of.__getitem__)]
        whole = [self._program_of[call].uses_often for unit, group in units if not unit.is_part for call in group]
        if len(units) > 1 and any(whole):
            raise refused(
                f"one backward through two calls of the model, each of which uses {next(filter(None, whole))} several "
                "times, and which are computed by two replicas",
                "--replicas never, or a backward for each call",
            )
        return [(unit.replica, group) for unit, group in units]

"""The looped layout, which interleaved and zero-bubble share: v stages on each of n ranks, dealt out in turn.

Stage s is on the rank of stage ``s mod n``. A rank works in rounds. In a round it runs ``c`` microbatches through its
first stage, then through its second, and so on; backwards begin with its last stage. The m microbatches form
``max(m // n, 1)`` rounds of equal size. With one stage per rank, rounds make no difference, and m may be any number.

Source: Megatron-LM, arXiv:2104.04473, section 2.2 (where ``c = n``); rounds of other sizes as in
torch.distributed.pipelining.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import ScheduleSpec
from autopipe.schedules.kind import Option, check_request

STAGES_PER_RANK = Option("stages_per_rank", 0, 0, 1024, "the number that the layout must have; 0: any number")
Unit = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True, slots=True)
class Loop:
    """A looped layout and its rounds. A *place* is the index of a rank in ``ranks``."""

    ranks: tuple[int, ...]  # ranks[k] has stages k, k + n, k + 2n, ...
    stages_per_rank: int
    num_microbatches: int  # in a minibatch
    round_size: int  # microbatches in a round

    @staticmethod
    def of(name: str, request: ScheduleSpec) -> Loop:
        """Return the loop of a request. Raises: ScheduleError if its layout is not looped or rounds are unequal."""
        check_request(name, request)
        n, p, m = request.num_ranks, request.num_stages, request.num_microbatches
        ranks = tuple(replicas[0] for replicas in request.stage_ranks[:n])
        if request.stage_ranks != tuple((ranks[stage % n],) for stage in range(p)) or p % n:
            raise ScheduleError(
                f"{name} deals {p} stages out to {n} ranks in turn, the same number to each and no replicas; "
                f"given {request.stage_ranks}",
                remedy=f"use {-(-p // n) * n} stages, with stage s on rank s mod {n}",
            )
        requested = request.options.get(STAGES_PER_RANK.name, 0)
        if requested and requested != p // n:
            raise ScheduleError(
                f"stages_per_rank is {requested}, but {p} stages on {n} ranks are {p // n} per rank",
                remedy=f"use {requested * n} stages, or stages_per_rank={p // n}",
            )
        rounds = max(m // n, 1) if p > n else 1
        if m % rounds:
            raise ScheduleError(
                f"{name} runs microbatches in rounds of equal size, and {m} microbatches on {n} ranks do not divide "
                f"into {rounds} rounds",
                remedy=f"use {m - m % rounds} or {m - m % n + n} microbatches",
            )
        return Loop(ranks, p // n, m, m // rounds)

    def forwards(self, place: int) -> list[Unit]:
        """Return a rank's forwards in order."""
        return self._units(place, list(range(self.stages_per_rank)))

    def backwards(self, place: int) -> list[Unit]:
        """Return a rank's backwards in order."""
        return self._units(place, list(reversed(range(self.stages_per_rank))))

    def _units(self, place: int, chunks: list[int]) -> list[Unit]:
        n, c = len(self.ranks), self.round_size
        return [
            (chunk * n + place, j)
            for first in range(0, self.num_microbatches, c)
            for chunk in chunks
            for j in range(first, first + c)
        ]

    def warmup(self, place: int, per_hop: int) -> int:
        """Return how many forwards a rank runs first. ``per_hop``: additional ones per rank between it and the last."""
        last = (self.stages_per_rank - 1) * self.round_size
        return min(last + per_hop * (len(self.ranks) - 1 - place), self.stages_per_rank * self.num_microbatches)

    def in_flight(self, per_hop: int, late: int) -> list[int]:
        """Return the in-flight bound of every stage: that of its rank over all its stages, at most all microbatches.

        ``late``: weight halves that a rank defers, per rank between it and the first.
        """
        in_flight = [self.warmup(place, per_hop) + 1 + late * place for place in range(len(self.ranks))]
        return [min(count, self.num_microbatches) for count in in_flight * self.stages_per_rank]

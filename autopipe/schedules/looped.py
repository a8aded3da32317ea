"""What interleaved and zero-bubble share: stages dealt out to the ranks in turn, v to each, and their order of work.

Stage s is on the rank of stage ``s mod n``. A round is ``c`` microbatches through every stage of a rank: forwards of
its first stage, then of its second, ...; backwards of its last stage first. The m microbatches make ``max(m // n, 1)``
rounds of equal size; with one stage a rank rounds make no difference, and any m will do.

Source: Megatron-LM, arXiv:2104.04473, section 2.2 (which asks for ``c = n``); rounds of other sizes as in
torch.distributed.pipelining.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import ScheduleSpec
from autopipe.schedules.kind import Option, check_request

STAGES_PER_RANK = Option("stages_per_rank", 0, 0, 1024, "what the layout must have; 0: whatever it has")
Unit = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True, slots=True)
class Loop:
    """``ranks[k]`` has stages ``k, k + n, k + 2n, ...``; ``round_size``: microbatches of a round."""

    ranks: tuple[int, ...]
    stages_per_rank: int
    num_microbatches: int
    round_size: int

    @staticmethod
    def of(name: str, request: ScheduleSpec) -> Loop:
        """Read the loop off a request. Raises: ScheduleError for another layout or rounds of unequal size."""
        check_request(name, request)
        n, p, m = request.num_ranks, request.num_stages, request.num_microbatches
        ranks = tuple(replicas[0] for replicas in request.stage_ranks[:n])
        if request.stage_ranks != tuple((ranks[stage % n],) for stage in range(p)) or p % n:
            raise ScheduleError(
                f"{name} deals {p} stages out to {n} ranks in turn, the same number to each and no replicas; "
                f"given {request.stage_ranks}",
                remedy=f"{-(-p // n) * n} stages, stage s on rank s mod {n}",
            )
        asked = request.options.get(STAGES_PER_RANK.name, 0)
        if asked and asked != p // n:
            raise ScheduleError(f"{asked} stages a rank are asked for; {p} stages on {n} ranks are {p // n} a rank")
        rounds = max(m // n, 1) if p > n else 1
        if m % rounds:
            raise ScheduleError(
                f"{name} runs microbatches in rounds of equal size: {m} on {n} ranks are {rounds} rounds",
                remedy=f"{m - m % rounds} or {m - m % n + n} microbatches",
            )
        return Loop(ranks, p // n, m, m // rounds)

    def forwards(self, place: int) -> list[Unit]:
        """Return a rank's forwards in order; ``place``: its index in ``ranks``."""
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
        """Return how many forwards a rank does first; ``per_hop``: more for each rank further from the end."""
        last = (self.stages_per_rank - 1) * self.round_size
        return min(last + per_hop * (len(self.ranks) - 1 - place), self.stages_per_rank * self.num_microbatches)

    def in_flight(self, per_hop: int, late: int) -> list[int]:
        """Return the bound for every stage: what its rank holds over all its stages, or all microbatches if fewer.

        ``late``: weight halves that wait, for each rank further from the start.
        """
        in_flight = [self.warmup(place, per_hop) + 1 + late * place for place in range(len(self.ranks))]
        return [min(count, self.num_microbatches) for count in in_flight * self.stages_per_rank]

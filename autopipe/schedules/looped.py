"""The looped layout, which interleaved and zero-bubble share: v stages on each of n groups of ranks, dealt out in turn.

Stage s is on the group of stage ``s mod n``. Without replicas, a group is one rank. With d replicas, every group has d
ranks, and replica k of each group forms a pipeline with replica k of the others: a microbatch is on the same replica at
every stage. The d pipelines share the microbatches of a minibatch round robin and run the same order.

A rank works in rounds. In a round it runs ``c`` microbatches through its first stage, then through its second, and so
on; backwards begin with its last stage. The m microbatches of a pipeline form ``max(m // n, 1)`` rounds of equal size.
With one stage per rank, rounds make no difference, and m may be any number.

Source: Megatron-LM, arXiv:2104.04473, section 2.2 (where ``c = n``) and section 3 (with data parallelism); rounds of
other sizes as in torch.distributed.pipelining.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import ScheduleSpec
from autopipe.schedules.kind import Option, check_request
from autopipe.schedules.rows import own_microbatches

STAGES_PER_RANK = Option("stages_per_rank", 0, 0, 1024, "the number that the layout must have; 0: any number")
Unit = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True, slots=True)
class Loop:
    """A looped layout. A *place* is the index of a group in ``groups``."""

    request: ScheduleSpec
    groups: tuple[tuple[int, ...], ...]  # groups[k] has stages k, k + n, k + 2n, ...
    stages_per_rank: int

    @staticmethod
    def of(name: str, request: ScheduleSpec) -> Loop:
        """Return the loop of a request. Raises: ScheduleError if its layout is not looped or rounds are unequal."""
        check_request(name, request)
        p, n = request.num_stages, len(set(request.stage_ranks))
        groups = request.stage_ranks[:n]
        _check_layout(name, request, groups)
        requested = request.options.get(STAGES_PER_RANK.name, 0)
        if requested and requested != p // n:
            raise ScheduleError(
                f"stages_per_rank is {requested}, but {p} stages on {_groups_of(groups)} are {p // n} per rank",
                remedy=f"use {requested * n} stages, or stages_per_rank={p // n}",
            )
        loop = Loop(request, groups, p // n)
        for microbatches in sorted({loop.least_share, loop.largest_share}):
            loop.check_rounds(name, microbatches)
        return loop

    @property
    def replicas(self) -> int:
        """The number of pipelines."""
        return len(self.groups[0])

    @property
    def least_share(self) -> int:
        """The fewest microbatches of a minibatch that a pipeline runs."""
        return self.request.num_microbatches // self.replicas

    @property
    def largest_share(self) -> int:
        """The most microbatches of a minibatch that a pipeline runs."""
        return -(-self.request.num_microbatches // self.replicas)

    def check_rounds(self, name: str, microbatches: int) -> None:
        """Check that a pipeline's microbatches form rounds of equal size. Raises: ScheduleError."""
        n, d, m = len(self.groups), self.replicas, self.request.num_microbatches
        rounds = self._rounds(microbatches)
        if microbatches % rounds:
            shared = f", of which a pipeline of {n} ranks runs {microbatches}," if d > 1 else f" on {n} ranks"
            fewer, more = (microbatches - microbatches % rounds) * d, (microbatches - microbatches % n + n) * d
            raise ScheduleError(
                f"{name} runs microbatches in rounds of equal size, and {m} microbatches{shared} do not divide "
                f"into {rounds} rounds",
                remedy=f"use {fewer} or {more} microbatches",
            )

    def _rounds(self, microbatches: int) -> int:
        return max(microbatches // len(self.groups), 1) if self.stages_per_rank > 1 else 1

    def place_of(self, rank: int) -> int:
        """Return the place of a rank."""
        return next(place for place, ranks in enumerate(self.groups) if rank in ranks)

    def forwards(self, rank: int, minibatch: int) -> list[Unit]:
        """Return a rank's forwards in order."""
        return self._units(rank, minibatch, list(range(self.stages_per_rank)))

    def backwards(self, rank: int, minibatch: int) -> list[Unit]:
        """Return a rank's backwards in order."""
        return self._units(rank, minibatch, list(reversed(range(self.stages_per_rank))))

    def _units(self, rank: int, minibatch: int, chunks: list[int]) -> list[Unit]:
        place, n = self.place_of(rank), len(self.groups)
        share = own_microbatches(self.request, place, rank, minibatch)
        size = len(share) // self._rounds(len(share))
        return [
            (chunk * n + place, j)
            for first in range(0, len(share), size or 1)
            for chunk in chunks
            for j in share[first : first + size]
        ]

    def warmup(self, place: int, per_hop: int, microbatches: int) -> int:
        """Return how many forwards a rank of a pipeline with this many microbatches runs first.

        ``per_hop``: additional ones per rank between it and the last.
        """
        last = (self.stages_per_rank - 1) * (microbatches // self._rounds(microbatches))
        return min(last + per_hop * (len(self.groups) - 1 - place), self.stages_per_rank * microbatches)

    def in_flight(self, per_hop: int, late: int) -> list[int]:
        """Return the in-flight bound of every stage: that of its rank over all its stages, at most all microbatches.

        ``late``: weight halves that a rank defers, per rank between it and the first.
        """
        shares = {self.least_share, self.largest_share}
        return [
            max(min(self.warmup(place, per_hop, m) + 1 + late * place, m) for m in shares)
            for place in range(len(self.groups))
        ] * self.stages_per_rank


def _check_layout(name: str, request: ScheduleSpec, groups: tuple[tuple[int, ...], ...]) -> None:
    """Check that stages are dealt out to groups of equal size. Raises: ScheduleError."""
    p, n = request.num_stages, len(groups)
    distinct = sum(len(ranks) for ranks in groups) == request.num_ranks
    dealt = request.stage_ranks == tuple(groups[stage % n] for stage in range(p)) and p % n == 0
    if dealt and distinct and len({len(ranks) for ranks in groups}) == 1:
        return
    d = len(groups[0])
    if d == 1 and all(len(ranks) == 1 for ranks in request.stage_ranks):
        what, remedy = "", f"use {-(-p // n) * n} stages, with stage s on rank s mod {n}"
    else:
        what = ", each in groups of equally many replicas, in the same order at every stage"
        remedy = "give every stage equally many ranks, and stages that share a rank the same ranks in the same order"
    raise ScheduleError(
        f"{name} deals {p} stages out to {request.num_ranks} ranks in turn, the same number to each{what}; "
        f"given {request.stage_ranks}",
        remedy=remedy,
    )


def _groups_of(groups: tuple[tuple[int, ...], ...]) -> str:
    d = len(groups[0])
    return f"{len(groups)} ranks" if d == 1 else f"{len(groups)} groups of {d} ranks"

"""``RankOrder``: which rank runs which stage of which replica.

::

    rank     0        1        2        3
    stage    0        1        0        1
    replica  0        0        1        1   (the last one: it also runs whole calls, and its last rank the tail)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankOrder:
    """The ranks of a run, stages of one replica next to each other."""

    num_ranks: int
    num_stages: int

    @property
    def num_replicas(self) -> int:
        """The number of copies of the model."""
        return self.num_ranks // self.num_stages

    @property
    def last_replica(self) -> int:
        """The replica whose last stage runs what the script computes from outputs."""
        return self.num_replicas - 1

    def stage_of(self, rank: int) -> int:
        """Return the stage of a rank."""
        return rank % self.num_stages

    def replica_of(self, rank: int) -> int:
        """Return the replica of a rank."""
        return rank // self.num_stages

    def rank_of(self, replica: int, stage: int) -> int:
        """Return the rank of a stage of a replica."""
        return replica * self.num_stages + stage

    def ranks_of(self, replica: int) -> range:
        """Return the ranks of a replica, by stage."""
        return range(self.rank_of(replica, 0), self.rank_of(replica + 1, 0))

    def replica_of_part(self, part: int, count: int) -> int:
        """Return the replica of a part of a batch in ``count`` parts: shares of parts next to each other, in order."""
        return self.last_replica - (count - 1 - part) * self.num_replicas // count

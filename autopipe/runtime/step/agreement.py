"""``Agreement``: a short vector summed over all ranks, for the few decisions that all ranks must take alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopipe.ir.channel import CONTROL, Channel
from autopipe.runtime.events import Reporter
from autopipe.runtime.transport.base import Transport


@dataclass(frozen=True, slots=True)
class Agreement:
    """Sums vectors over all ranks, through rank 0."""

    transport: Transport
    reporter: Reporter

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the sum of the vectors of all ranks. Every rank calls it, with zeros if it has nothing to contribute.

        Rank 0 adds the vectors in the order of the ranks, so that every rank gets the same bits.
        """
        rank, world_size = self.transport.rank, self.transport.world_size
        if world_size == 1:
            return vector
        self.reporter.at("agree", waiting=True)
        if rank != 0:
            self.transport.send(Channel(CONTROL, 0, 0, rank, 0), vector)
            return self.transport.receive(Channel(CONTROL, 0, 0, 0, rank), vector.shape, vector.dtype).wait()
        total = vector.clone()
        for other in range(1, world_size):
            total += self.transport.receive(Channel(CONTROL, 0, 0, other, 0), vector.shape, vector.dtype).wait()
        for other in range(1, world_size):
            self.transport.send(Channel(CONTROL, 0, 0, 0, other), total.clone())
        return total

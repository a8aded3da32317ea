"""``Agreement``: a short vector summed over all ranks, for the few decisions that all ranks must take alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopipe.runtime.events import Reporter
from autopipe.runtime.transport.base import Transport


@dataclass(frozen=True, slots=True)
class Agreement:
    """Sums vectors over all ranks."""

    transport: Transport
    reporter: Reporter

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the sum of the vectors of all ranks. Every rank calls it, with zeros if it has nothing to contribute.

        Each element has one rank that contributes, or counts ranks. So the sum is exact in any order of the ranks.
        """
        if self.transport.world_size > 1:
            self.reporter.at("agree", waiting=True)
            self.transport.agree(vector)
        return vector

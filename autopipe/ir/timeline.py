"""``Timeline``: when each rank ran each instruction. Measured and simulated timelines have the same type."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopipe.ir.schedule import COMPUTE, Instruction


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction on one rank; seconds from the start of the timeline."""

    rank: int
    instruction: Instruction
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of all ranks."""

    source: str  # "simulated" or "measured"
    num_ranks: int
    spans: tuple[Span, ...]
    peak_bytes: tuple[int, ...] = ()  # by rank; () if not known

    @property
    def seconds(self) -> float:
        """The time from the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(span.end_seconds for span in self.spans) - min(span.start_seconds for span in self.spans)

    def busy_seconds(self, rank: int) -> float:
        """Return the seconds during which a rank computes (forward and backward)."""
        return math.fsum(
            span.end_seconds - span.start_seconds
            for span in self.spans
            if span.rank == rank and span.instruction.op in COMPUTE
        )

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time during which they do not compute, from 0 to 1."""
        total = self.seconds * self.num_ranks
        return 1 - math.fsum(self.busy_seconds(rank) for rank in range(self.num_ranks)) / total if total else 0.0

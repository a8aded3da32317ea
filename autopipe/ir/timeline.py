"""``Timeline``: who did what when. A measured run and a simulated one are the same type."""

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
    """``source``: "simulated" or "measured". ``peak_bytes``: per rank, empty where it is not known."""

    source: str
    num_ranks: int
    spans: tuple[Span, ...]
    peak_bytes: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(span.end_seconds for span in self.spans) - min(span.start_seconds for span in self.spans)

    def busy_seconds(self, rank: int) -> float:
        """Return the time that a rank computes (forward and backward)."""
        return math.fsum(
            span.end_seconds - span.start_seconds
            for span in self.spans
            if span.rank == rank and span.instruction.op in COMPUTE
        )

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they do not compute."""
        total = self.seconds * self.num_ranks
        return 1 - math.fsum(self.busy_seconds(rank) for rank in range(self.num_ranks)) / total if total else 0.0

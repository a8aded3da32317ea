"""``Channel``: the address of messages between two ranks, in one direction and for one purpose. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATION, GRADIENT, TIE_GRADIENT, TIE_VALUE, LOAN, LOSS, BATCH = (
    "activation",
    "gradient",
    "tie-gradient",
    "tie-value",
    "loan",
    "loss",
    "batch",
)
# the kinds whose tensors are contiguous and stay on the CPU, on any device that the rank computes on
FIGURES = (LOSS, BATCH)


@dataclass(frozen=True, slots=True, order=True)
class Channel:
    """One direction between two ranks; messages arrive in the order in which they are sent.

    Two ranks may exchange messages for several pairs of stages. Each pair has its own channel.
    """

    kind: str  # one of the constants above
    from_stage: int
    to_stage: int
    from_rank: int
    to_rank: int

    def __str__(self) -> str:
        source, target = f"{self.from_stage} (rank {self.from_rank})", f"{self.to_stage} (rank {self.to_rank})"
        return f"{self.kind} of stage {source} to stage {target}"

"""``Channel``: one direction between two ranks for one purpose, as plain data. Transports carry it, plans name it."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATION, GRADIENT, TIE_GRADIENT, TIE_VALUE, LOAN, CONTROL, LOSS, BATCH = (
    "activation",
    "gradient",
    "tie-gradient",
    "tie-value",
    "loan",
    "control",
    "loss",
    "batch",
)
# what stays on the CPU, whatever device the rank computes on, and is contiguous
FIGURES = (CONTROL, LOSS, BATCH)


@dataclass(frozen=True, slots=True, order=True)
class Channel:
    """One first-in-first-out direction. Stages keep apart what two ranks exchange for several pairs of stages."""

    kind: str
    from_stage: int
    to_stage: int
    from_rank: int
    to_rank: int

    def __str__(self) -> str:
        source, target = f"{self.from_stage} (rank {self.from_rank})", f"{self.to_stage} (rank {self.to_rank})"
        return f"{self.kind} of stage {source} to stage {target}"

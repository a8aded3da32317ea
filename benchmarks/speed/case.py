"""What the cases of the benchmark have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Options:
    """How much is measured, and where."""

    folder: Path  # for the work directories, removed at the end
    quick: bool = False  # the smallest run of each case, which shows that it works
    golden: Path | None = None  # a folder with PipeDream's profiles and golden.csv; None: without them
    device: str = "cpu"  # of case (e)

    def steps(self, full: int, quick: int) -> int:
        """Return a number of steps or repetitions."""
        return quick if self.quick else full


class Case(Protocol):
    """A table of the page. Each round measures every system once, in turn."""

    title: str

    def round(self, number: int) -> None:
        """Measure everything once. ``number``: from 0; cases that need no repetition return if it is not 0."""

    def lines(self) -> list[str]:
        """Return what was measured so far as Markdown."""


def pipeline_words(ranks: int, microbatches: int, batch_size: int) -> list[str]:
    """Return the options of a plan with one rank per stage."""
    sizes = ["--batch-size", str(batch_size), "--num-microbatches", str(microbatches)]
    return ["--gpus", str(ranks), *sizes, "--replicas", "never"]

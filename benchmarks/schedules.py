"""Time the construction, lowering, simulation and validation of every schedule (``python benchmarks/schedules.py``)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopipe.ir.schedule import StageEdges
from autopipe.schedules import REGISTRY, Costs, lower, make, simulate, validate
from autopipe.schedules.kind import line

T = TypeVar("T")


def timed(call: Callable[[], T], repeats: int = 3) -> tuple[float, T]:
    """Return (least CPU seconds, result)."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        result = call()
        best = min(best, time.process_time() - start)
    return best, result


def main(p: int = 64, m: int = 512) -> None:
    """Print one line per schedule, for p stages and m microbatches."""
    print(f"{p} stages x {m} microbatches, CPU seconds")
    print(f"{'schedule':12} {'make':>7} {'lower':>7} {'simulate':>8} {'total':>7} {'validate':>8} {'bubble':>7}")
    for name in REGISTRY:
        if name == "custom":
            continue
        making, schedule = timed(lambda name=name: make(name, line(p, m)))  # type: ignore[misc]
        lowering, lowered = timed(lambda schedule=schedule: lower(schedule, StageEdges.chain(p)))  # type: ignore[misc]
        running, timeline = timed(lambda lowered=lowered: simulate(lowered, Costs.uniform(p)))  # type: ignore[misc]
        checking, _ = timed(lambda lowered=lowered: validate(lowered), 1)  # type: ignore[misc]
        total = making + lowering + running
        figures = f"{making:7.3f} {lowering:7.3f} {running:8.3f} {total:7.3f} {checking:8.3f}"
        print(f"{name:12} {figures} {timeline.bubble_fraction:7.2%}")


if __name__ == "__main__":
    main()

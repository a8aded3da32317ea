"""Plans side by side, and why one is as it is: what ``plan`` prints below its stages."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from autopipe.ir.plan import Plan
from autopipe.report.text import in_bytes, in_seconds

if TYPE_CHECKING:
    from autopipe.planning import Comparison, Explanation

WIDTH = 100


def configuration(plan: Plan) -> str:
    """Return the ranks a stage as the papers write them: ``3-1``; ``8x1`` for eight stages of one."""
    counts = [str(stage.replicas) for stage in plan.stages]
    if len(counts) > 4 and set(counts) == {"1"}:
        return f"{len(counts)}x1"
    return "-".join(counts)


def comparison(found: Comparison | None) -> tuple[Any, ...]:
    """Return one row a contender, and in words whether a pipeline pays."""
    if found is None:
        return ()
    table = Table(title="compared, same minibatch", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in ("plan", "ranks a stage", "schedule"):
        table.add_column(name, overflow="fold")
    for name in ("microbatches", "a step", "samples/s", "idle", "most memory"):
        table.add_column(name, justify="right")
    reasons: list[str] = []
    for contender in found.contenders:
        plan = contender.plan
        if plan is None:
            table.add_row(contender.name, "none")
            reasons.extend(textwrap.wrap(f"no {contender.name}: {contender.reason}", WIDTH, subsequent_indent="  "))
            continue
        table.add_row(
            contender.name,
            configuration(plan),
            plan.schedule,
            str(plan.num_microbatches),
            in_seconds(plan.predicted.step_seconds),
            f"{plan.predicted.samples_per_second:.4g}",
            f"{plan.predicted.bubble_fraction:.0%}",
            in_bytes(max(stage.peak_bytes for stage in plan.stages)),
        )
    return (table, *reasons, *textwrap.wrap(found.verdict, WIDTH))


def explanation(found: Explanation | None) -> tuple[str, ...]:
    """Return why the cuts are where they are, one line each."""
    return () if found is None else ("why:", *(f"  {line}" for line in found.lines()))

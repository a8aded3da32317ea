"""The table of an estimated profile, which was counted and not timed."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from autopipe.ir.profile import PassWork, Profile
from autopipe.units import in_bytes, in_flops


def profile(profile: Profile) -> tuple[Any, ...]:
    """Return one row per microbatch size, with operations, memory traffic and memory, and a line on the parameters."""
    table = Table(
        title=f"{profile.graph.name}, counted: nothing was timed",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
    )
    for name in ("microbatch", "forward", "backward", "memory traffic", "kept for backward", "workspace"):
        table.add_column(name, justify="right")
    for measurement in profile.measurements:
        costs, work = measurement.costs.values(), measurement.work.values()
        table.add_row(
            str(measurement.microbatch_size),
            in_flops(sum(entry.forward.flops for entry in work)),
            in_flops(sum(entry.backward.flops for entry in work)),
            in_bytes(sum(_moved(entry.forward) + _moved(entry.backward) for entry in work)),
            in_bytes(sum(cost.saved_bytes for cost in costs)),
            in_bytes(max((cost.workspace_bytes for cost in costs), default=0)),
        )
    state = profile.optimizer_bytes_per_byte * profile.trained_bytes
    every = sum(spec.num_bytes({}) for spec in profile.graph.parameters.values())
    return table, f"{in_bytes(every)} of parameters; the optimizer keeps {in_bytes(state)}"


def _moved(work: PassWork) -> int:
    return work.matrix_bytes + work.other_bytes

"""The adapters of ``--log``. They are called in one thread of the command's process, and continue over resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from autopipe.commands.metrics.observers import RunLogger
from autopipe.ir.plan import Plan
from autopipe.runtime.job import RunDirectory

_FIGURES = ("loss", "evaluation_loss", "learning_rate", "gradient_norm", "samples_per_second", "step_seconds")


def figures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a row of the metrics that change from step to step."""
    return {name: float(row[name]) for name in _FIGURES if row.get(name) is not None}


def described(plan: Plan) -> dict[str, Any]:
    """Return what a tool shows as the configuration of a run."""
    spec = plan.workload
    return {
        "target": spec.target,
        "arguments": dict(spec.arguments),
        "seed": spec.seed,
        "precision": spec.precision,
        "batch_size": plan.batch_size,
        "schedule": plan.schedule,
        "ranks": plan.num_processes,
        "stages": len(plan.stages),
        "num_microbatches": plan.num_microbatches,
    }


class TensorBoardLogger:
    """Event files in the folder ``tensorboard`` of the run. Steps that are repeated replace the former ones."""

    name = "tensorboard"

    def __init__(self, run: RunDirectory, step: int, plan: Plan) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # purge_step: TensorBoard does not show the values that were written before, from this step on
        self._writer: Any = SummaryWriter(str(run.path / "tensorboard"), purge_step=step or None)
        if not step:
            self._writer.add_text("run", f"```\n{json.dumps(described(plan), indent=1)}\n```")

    def log(self, row: Mapping[str, Any]) -> None:
        """Record the figures of a row."""
        for name, value in figures_of(row).items():
            self._writer.add_scalar(name, value, row["step"], walltime=row["time"])

    def close(self, *, ok: bool) -> None:
        """Write what is left."""
        self._writer.close()


KINDS: dict[str, Callable[[RunDirectory, int, Plan], RunLogger]] = {"tensorboard": TensorBoardLogger}

"""The adapters of ``--log``: TensorBoard, Weights & Biases, MLflow. One thread of the command's process calls them.

A resumed run continues the same run of the tool: ``loggers.json`` in the run directory has the tool's name for it.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from autopipe.commands.metrics.observers import RunLogger
from autopipe.errors import RunError
from autopipe.ir.artifact import write_text
from autopipe.ir.plan import Plan
from autopipe.runtime.job import RunDirectory

_FIGURES = ("loss", "evaluation_loss", "learning_rate", "gradient_norm", "samples_per_second", "step_seconds")
_NAME = "loggers.json"
_PROJECT = "autopipe"
# MLflow stores many metrics at once faster than one by one
_MOST_METRICS, _STORE_SECONDS = 500, 1.0


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


class WandbLogger:
    """A run of Weights & Biases, with its files in the run directory. ``WANDB_PROJECT`` and others apply."""

    name = "wandb"

    def __init__(self, run: RunDirectory, step: int, plan: Plan) -> None:
        import wandb

        known = _identity(run, self.name)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            id=known or uuid.uuid4().hex[:16],
            name=os.environ.get("WANDB_NAME") or run.path.resolve().name,
            dir=str(run.path),
            config=described(plan),
            resume="allow" if known else None,
            reinit="create_new",
            settings=wandb.Settings(console="off"),
        )
        _remember(run, self.name, self._run.id)

    def log(self, row: Mapping[str, Any]) -> None:
        """Record the figures of a row."""
        self._run.log(figures_of(row), step=row["step"])

    def close(self, *, ok: bool) -> None:
        """Upload what is left, or write it if offline."""
        self._run.finish(exit_code=0 if ok else 1)


class MlflowLogger:
    """A run of MLflow, in the store of ``MLFLOW_TRACKING_URI`` and the experiment of ``MLFLOW_EXPERIMENT_NAME``."""

    name = "mlflow"

    def __init__(self, run: RunDirectory, step: int, plan: Plan) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric: Callable[..., Any] = Metric
        self._client: Any = MlflowClient()
        self._waiting: list[Any] = []
        self._stored = time.monotonic()
        known = _identity(run, self.name)
        if known:
            self._id = known
            self._client.update_run(known, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT
        existing = self._client.get_experiment_by_name(experiment)
        place = self._client.create_experiment(experiment) if existing is None else existing.experiment_id
        self._id = self._client.create_run(place, run_name=run.path.resolve().name).info.run_id
        params = [Param(key, str(value)) for key, value in described(plan).items()]
        self._client.log_batch(self._id, params=params)
        _remember(run, self.name, self._id)

    def log(self, row: Mapping[str, Any]) -> None:
        """Record the figures of a row; the store has them about a second later."""
        milliseconds = int(row["time"] * 1000)
        self._waiting += [self._metric(key, v, milliseconds, row["step"]) for key, v in figures_of(row).items()]
        if len(self._waiting) >= _MOST_METRICS or time.monotonic() - self._stored > _STORE_SECONDS:
            self._store()

    def close(self, *, ok: bool) -> None:
        """Store what is left, and end the run."""
        self._store()
        self._client.set_terminated(self._id, status="FINISHED" if ok else "FAILED")

    def _store(self) -> None:
        while self._waiting:
            now, self._waiting = self._waiting[:_MOST_METRICS], self._waiting[_MOST_METRICS:]
            self._client.log_batch(self._id, metrics=now)
        self._stored = time.monotonic()


KINDS: dict[str, Callable[[RunDirectory, int, Plan], RunLogger]] = {
    kind.name: kind for kind in (TensorBoardLogger, WandbLogger, MlflowLogger)
}


def _identities(run: RunDirectory) -> dict[str, str]:
    path = run.path / _NAME
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunError(f"{_NAME} cannot be read: {error}", where=str(path), remedy="delete it") from None
    if not isinstance(names, dict) or not all(re.fullmatch(r"[\w-]{1,64}", str(name)) for name in names.values()):
        raise RunError(f"{_NAME} is damaged", where=str(path), remedy="delete it")
    return names


def _identity(run: RunDirectory, tool: str) -> str:
    """Return the tool's name for a run that it has begun to record, else ""."""
    return _identities(run).get(tool, "")


def _remember(run: RunDirectory, tool: str, identity: str) -> None:
    write_text(run.path / _NAME, json.dumps({**_identities(run), tool: identity}, indent=1) + "\n")

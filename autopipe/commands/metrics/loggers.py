"""The adapters of ``--log``: TensorBoard, Weights & Biases, MLflow. They are called in one thread of the command.

A resumed run continues the same run of the tool: ``loggers.json`` in the run directory has the ID of each.
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
_IDS = "loggers.json"
_PROJECT = "autopipe"
# an MLflow store takes many metrics in one request, up to 1000, and each request has its costs
_BATCH, _BATCH_SECONDS = 500, 1.0
# the longest value of a parameter that every MLflow server accepts
_PARAM_LENGTH = 500


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
        self._writer: Any = SummaryWriter(str(run.path / "tensorboard"), purge_step=max(step, 0))
        if step < 0:
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

        known = _id_of(run, self.name, step)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            id=known or uuid.uuid4().hex[:16],
            name=os.environ.get("WANDB_NAME") or run.path.resolve().name,
            dir=str(run.path),
            config=described(plan),
            resume="allow" if known else None,
            reinit="create_new",  # from Python, the user may have a run of their own
            settings=wandb.Settings(console="off"),
        )
        # its own step only grows, and rows of steps that are repeated would be dropped
        self._run.define_metric("*", step_metric="step")
        _keep_id(run, self.name, self._run.id)

    def log(self, row: Mapping[str, Any]) -> None:
        """Record the figures of a row."""
        self._run.log({"step": row["step"], **figures_of(row)})

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
        self._id = _id_of(run, self.name, step)
        if self._id:
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT
        existing = self._client.get_experiment_by_name(experiment)
        place = self._client.create_experiment(experiment) if existing is None else existing.experiment_id
        self._id = self._client.create_run(place, run_name=run.path.resolve().name).info.run_id
        params = [Param(key, str(value)[:_PARAM_LENGTH]) for key, value in described(plan).items()]
        self._client.log_batch(self._id, params=params)
        _keep_id(run, self.name, self._id)

    def log(self, row: Mapping[str, Any]) -> None:
        """Record the figures of a row; the store has them about a second later."""
        milliseconds = int(row["time"] * 1000)
        self._waiting += [self._metric(key, v, milliseconds, row["step"]) for key, v in figures_of(row).items()]
        if len(self._waiting) >= _BATCH or time.monotonic() - self._stored > _BATCH_SECONDS:
            self._store()

    def close(self, *, ok: bool) -> None:
        """Store what is left, and end the run."""
        self._store()
        self._client.set_terminated(self._id, status="FINISHED" if ok else "FAILED")

    def _store(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
            self._client.log_batch(self._id, metrics=batch)
        self._stored = time.monotonic()


KINDS: dict[str, Callable[[RunDirectory, int, Plan], RunLogger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}


def _ids(run: RunDirectory) -> dict[str, str]:
    path = run.path / _IDS
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunError(f"{_IDS} cannot be read: {error}", where=str(path), remedy="delete it") from None
    if not isinstance(ids, dict) or not all(re.fullmatch(r"[\w-]{1,64}", str(value)) for value in ids.values()):
        raise RunError(f"{_IDS} contains something other than IDs: {ids!r:.60}", where=str(path), remedy="delete it")
    return ids


def _id_of(run: RunDirectory, tool: str, step: int) -> str:
    """Return the tool's ID of a run that is resumed and that the tool has recorded before, else ""."""
    return _ids(run).get(tool, "") if step >= 0 else ""


def _keep_id(run: RunDirectory, tool: str, value: str) -> None:
    write_text(run.path / _IDS, json.dumps({**_ids(run), tool: value}, indent=1) + "\n")

"""The adapters of --log: the calls that they make, and what each tool has recorded where it is installed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from autopipe.commands.metrics import registry
from autopipe.errors import RunError
from autopipe.runtime.job import RunDirectory

SPEC = SimpleNamespace(target="model.py", arguments={}, seed=0, precision="fp32")
PLAN: Any = SimpleNamespace(
    workload=SPEC, batch_size=8, schedule="1f1b", num_processes=2, stages=(1, 2), num_microbatches=4
)
ROWS: tuple[dict[str, Any], ...] = (
    {"step": 0, "loss": 4.0, "learning_rate": 0.1, "time": 1e9, "skipped": False},
    {"step": 1, "loss": math.nan, "learning_rate": 0.1, "time": 1e9 + 1, "skipped": True},
    {"step": 2, "evaluation_loss": 3.0, "samples": 16, "time": 1e9 + 2},
)


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed (an extra)")


def record(name: str, path: Path, step: int, rows: tuple[dict[str, Any], ...] = ROWS, *, ok: bool = True) -> None:
    (logger,) = registry.begin((name,), RunDirectory(path), step, PLAN)
    for row in rows:
        logger.log(row)
    logger.close(ok=ok)


@pytest.mark.parametrize("name", registry.LOGGERS)
def test_a_missing_package_is_an_error_with_the_extra_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(registry.LOGGERS, name, "a_package_that_does_not_exist")
    with pytest.raises(RunError, match=f"--log {name} needs the package") as caught:
        registry.refuse_missing((name,))
    assert caught.value.remedy == f"pip install 'autopipe-train[{name}]'"


def test_a_folder_that_the_tool_has_written_is_not_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_folder_of_a_tool").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry.LOGGERS, "wandb", "a_folder_of_a_tool")
    with pytest.raises(RunError, match="is not installed"):
        registry.refuse_missing(("wandb",))


class FakeWandb(ModuleType):
    """Records the calls of the adapter, as wandb.init and its run have them."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[str, Any]] = []

    def Settings(self, **fields: Any) -> dict[str, Any]:
        return fields

    def init(self, **arguments: Any) -> SimpleNamespace:
        self.calls.append(("init", arguments))
        return SimpleNamespace(
            id=arguments["id"],
            define_metric=lambda name, step_metric: self.calls.append(("metric", (name, step_metric))),
            log=lambda figures: self.calls.append(("log", figures)),
            finish=lambda exit_code: self.calls.append(("finish", exit_code)),
        )


def test_wandb_has_each_row_with_its_step_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "models")
    monkeypatch.delenv("WANDB_NAME", raising=False)
    record("wandb", tmp_path, -1)
    record("wandb", tmp_path, 2, (), ok=False)
    record("wandb", tmp_path, -1, ())
    first, resumed, new = (arguments for name, arguments in fake.calls if name == "init")
    assert first["id"] == resumed["id"] != new["id"]
    assert (first["resume"], resumed["resume"], new["resume"]) == (None, "allow", None)
    assert json.loads((tmp_path / "loggers.json").read_text()) == {"wandb": new["id"]}
    assert (first["project"], first["name"], first["dir"]) == ("models", tmp_path.name, str(tmp_path))
    assert first["config"]["schedule"] == "1f1b" and first["config"]["ranks"] == 2
    assert ("metric", ("*", "step")) in fake.calls
    logged = [figures for name, figures in fake.calls if name == "log"]
    assert logged[0] == {"step": 0, "loss": 4.0, "learning_rate": 0.1}
    assert math.isnan(logged[1]["loss"]) and logged[2] == {"step": 2, "evaluation_loss": 3.0}
    assert [code for name, code in fake.calls if name == "finish"] == [0, 1, 0]


class FakeMlflow:
    """Records the calls of the adapter, as MlflowClient has them."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.requests = 0

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        assert name not in self.experiments
        return self.experiments.setdefault(name, str(len(self.experiments) + 1))

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        run_id = f"{len(self.runs):032x}"
        self.runs[run_id] = {"in": (experiment_id, run_name), "status": "RUNNING", "metrics": [], "params": {}}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status

    set_terminated = update_run

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(metrics) <= 1000  # as the servers of MLflow
        self.requests += 1
        self.runs[run_id]["metrics"] += metrics
        self.runs[run_id]["params"] |= dict(params)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMlflow]:
    fake = FakeMlflow()
    entities: Any = ModuleType("mlflow.entities")
    entities.Metric, entities.Param = (lambda *fields: fields), (lambda key, value: (key, value))
    tracking: Any = ModuleType("mlflow.tracking")
    tracking.MlflowClient = lambda: fake
    for module in (ModuleType("mlflow"), entities, tracking):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "models")
    return fake


def test_mlflow_has_each_figure_with_its_step_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, mlflow: FakeMlflow
) -> None:
    record("mlflow", tmp_path, -1)
    (run,) = mlflow.runs.values()
    assert (run["in"], run["status"]) == (("1", tmp_path.name), "FINISHED")
    assert run["params"]["target"] == "model.py" and run["params"]["arguments"] == "{}"
    assert run["metrics"][:2] == [("loss", 4.0, 10**12, 0), ("learning_rate", 0.1, 10**12, 0)]
    assert math.isnan(run["metrics"][2][1]) and run["metrics"][-1] == ("evaluation_loss", 3.0, 10**12 + 2000, 2)
    record("mlflow", tmp_path, 2, ({"step": 2, "loss": 2.0, "time": 1e9 + 3},), ok=False)
    assert len(mlflow.runs) == 1 and run["status"] == "FAILED" and run["metrics"][-1][:2] == ("loss", 2.0)
    record("mlflow", tmp_path, -1, ())
    assert len(mlflow.runs) == 2 and mlflow.experiments == {"models": "1"}


def test_mlflow_stores_many_figures_in_few_requests(tmp_path: Path, mlflow: FakeMlflow) -> None:
    rows = tuple({"step": step, "loss": 1.0, "learning_rate": 0.1, "time": 1e9} for step in range(1200))
    record("mlflow", tmp_path, -1, rows)
    (run,) = mlflow.runs.values()
    assert len(run["metrics"]) == 2400 and mlflow.requests < 20


def test_a_store_that_refuses_the_run_is_an_error_that_names_the_tool(tmp_path: Path, mlflow: FakeMlflow) -> None:
    (tmp_path / "loggers.json").write_text('{"mlflow": "deleted"}')
    with pytest.raises(RunError, match="--log mlflow cannot begin: KeyError: 'deleted'") as caught:
        registry.begin(("mlflow",), RunDirectory(tmp_path), 2, PLAN)
    assert "omit --log mlflow" in caught.value.remedy


@pytest.mark.parametrize("text", ["{", "[]", '{"mlflow": "../other"}'])
def test_a_damaged_file_of_ids_is_an_error_that_names_it(tmp_path: Path, mlflow: FakeMlflow, text: str) -> None:
    (tmp_path / "loggers.json").write_text(text)
    with pytest.raises(RunError, match=r"loggers\.json") as caught:
        registry.begin(("mlflow",), RunDirectory(tmp_path), 2, PLAN)
    assert caught.value.where == str(tmp_path / "loggers.json") and not mlflow.runs


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_reads_the_figures_of_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store.db")
    record("mlflow", tmp_path, -1)
    record("mlflow", tmp_path, 2, ({"step": 2, "loss": 2.0, "time": 1e9 + 3},))
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("autopipe").experiment_id])
    assert (run.info.status, run.info.run_name, run.data.params["schedule"]) == ("FINISHED", tmp_path.name, "1f1b")
    losses = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss")]
    assert [step for step, _ in losses] == [0, 1, 2] and (losses[0][1], losses[2][1]) == (4.0, 2.0)


def wandb_records(path: Path) -> Iterator[Any]:
    """Read a file of wandb: a header of 7 bytes, then parts of records, none across a block of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # complete, or the last part
            yield Record.FromString(record)
            record = b""


@needs("wandb")
@pytest.mark.filterwarnings("ignore")
def test_wandb_writes_the_figures_of_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    record("wandb", tmp_path, -1)
    record("wandb", tmp_path, 2, ({"step": 2, "loss": 2.0, "time": 1e9 + 3},))
    import wandb

    wandb.teardown()  # its process ends, and has written everything
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    records = [record for path in files for record in wandb_records(path)]
    ids = {record.run.run_id for record in records if record.HasField("run")}
    assert ids == {json.loads((tmp_path / "loggers.json").read_text())["wandb"]}
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    steps = [(row["step"], row.get("loss"), row.get("evaluation_loss")) for row in rows]
    assert steps[0] == (0, 4.0, None) and steps[2:] == [(2, None, 3.0), (2, 2.0, None)]


@needs("tensorboard")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, end, loss in ((-1, 4, 1.0), (2, 5, 2.0)):
        rows = [{"step": n, "loss": loss, "time": 1e9 + n, "skipped": False} for n in range(max(start, 0), end)]
        evaluation = {"step": end, "evaluation_loss": loss / 2, "time": 1e9 + end}
        record("tensorboard", tmp_path, start, (*rows, evaluation))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)
    ]  # fmt: skip
    assert [(event.step, event.value) for event in events.Scalars("evaluation_loss")] == [(5, 1.0)]
    assert events.Scalars("loss")[0].wall_time == 1e9

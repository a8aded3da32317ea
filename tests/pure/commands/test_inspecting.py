"""``runs`` and ``show``: states are those of the files, and a damaged run is a row with a reason."""

from __future__ import annotations

import fcntl
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.stored_profiles import stored_profile

from autopipe.commands.inspecting import history
from autopipe.commands.inspecting.details import show
from autopipe.commands.inspecting.history import Begun, Ended, Restarted
from autopipe.commands.inspecting.overview import locate, overview
from autopipe.commands.locks import only_one
from autopipe.commands.planning.choose import choose_plan
from autopipe.commands.store import Work
from autopipe.errors import AuditError, RunError
from autopipe.ir import artifact
from autopipe.ir.plan import Plan
from autopipe.planning.requests import PlanRequest
from autopipe.report import run_tables
from autopipe.report.results import Restart
from autopipe.runtime.job import Job, RunDirectory, read_rows

NOW = 1_800_000_000.0
WORK = Path(".autopipe")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    work = Work.begin(tmp_path_factory.mktemp("plan"), None)
    return choose_plan(stored_profile(), PlanRequest(gpus=2, link=1e10, gpu_memory_bytes=2**33), work, 16).plan


@pytest.fixture
def make(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunDirectory]:
    monkeypatch.chdir(tmp_path)

    def run(name: str, losses: Any = (3.0, 2.0, 1.0), steps: int = 3, saved: tuple[int, ...] = ()) -> RunDirectory:
        directory = RunDirectory(WORK / "runs" / name)
        directory.write_job(Job(steps=steps, epochs=0, batch_size=16))
        artifact.save(plan, directory.path / "plan.json")
        rows = [{"step": step, "loss": loss, "samples_per_second": 9.5} for step, loss in enumerate(losses)]
        directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for step in saved:
            (directory.checkpoints / f"step-{step:08d}").mkdir(parents=True)
        return directory

    return run


def begun(**fields: Any) -> Begun:
    return Begun(**({"steps": 3, "start_step": 0, "ranks": 2, "schedule": "1f1b", "time": NOW} | fields))


def state(name: str = "a") -> tuple[str, str]:
    row = next(row for row in overview(WORK) if row.name == name)
    return row.state, row.reason


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([begun(), Ended("finished", 3)], ("finished", "")),
        ([begun(), Ended("stopped", 2)], ("stopped", "")),
        ([begun(), Ended("failed", 2, "out of memory", "rank 1", "less")], ("failed", "out of memory")),
        ([begun(), Ended("interrupted", 2, "Ctrl-C")], ("interrupted", "")),
        ([begun()], ("interrupted", "")),  # killed
        ([begun(), Ended("stopped", 1), begun(start_step=1)], ("interrupted", "")),  # resumed, then killed
        ([begun(), Restarted(Restart(1, 0, "x", "y", 2, 1, 2))], ("interrupted", "")),
    ],
)
def test_the_state_is_how_the_last_command_ended(make: Any, entries: list[history.Entry], expected: Any) -> None:
    run = make("a")
    for entry in entries:
        history.append(run, entry)
    assert history.read(run) == tuple(entries)
    assert state() == expected


def test_a_locked_run_is_running_whatever_its_history_says(make: Any) -> None:
    run = make("a")
    history.append(run, begun())
    history.append(run, Ended("stopped", 2))
    with only_one(run.path, "trains"):
        assert state() == ("running", "")
        row = overview(WORK)[0]
        assert row.process["pid"] == os.getpid()
        assert f"kill -TERM {os.getpid()} on {row.process['host']}" in show(None).next[0]
    assert state() == ("stopped", "")


def test_looking_at_a_run_refuses_no_command(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make("a")
    flock = fcntl.flock
    looking = [True]

    def while_another_looks(descriptor: int, operation: int) -> None:
        if looking.pop():
            raise BlockingIOError
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", while_another_looks)
    looking.insert(0, False)
    with only_one(run.path, "trains"):
        assert looking == []


def test_a_run_of_an_earlier_version_is_finished_only_if_its_files_prove_it(make: Any) -> None:
    make("a", saved=(3,))
    make("b", steps=9, saved=(3,))
    make("c", steps=0, saved=(3,))  # the length of the data is not known
    assert [state(name)[0] for name in "abc"] == ["finished", "unknown", "unknown"]


def test_the_end_of_training_is_recorded_with_its_cause(make: Any) -> None:
    run = make("a")
    for error in (AuditError("differs", where="step 2", remedy="report"), KeyboardInterrupt(), ZeroDivisionError("0")):
        with pytest.raises(type(error)), history.recorded(run, begun(), lambda: (2, False)):
            raise error
    with history.recorded(run, begun(), lambda: (2, True)):
        pass
    ends = [entry for entry in history.read(run) if isinstance(entry, Ended)]
    assert [(end.state, end.what) for end in ends] == [
        ("failed", "differs"),
        ("interrupted", "Ctrl-C"),
        ("failed", "ZeroDivisionError: 0"),
        ("stopped", ""),
    ]
    assert [attempt.state for attempt in show(None).attempts] == ["failed", "interrupted", "failed", "stopped"]


def damage_of(kind: str, run: RunDirectory) -> None:
    if kind == "empty":
        for path in run.path.iterdir():
            path.unlink()
    elif kind == "job":
        run.path.joinpath("job.json").write_text("{")
    elif kind == "plan":
        text = run.path.joinpath("plan.json").read_text()
        run.path.joinpath("plan.json").write_text(text.replace('"num_ranks": 2', '"num_ranks": 3'))
    elif kind == "checkpoints":
        run.checkpoints.write_text("a file")
    elif kind == "metrics":
        run.metrics.write_bytes(b'\xff\n[]\n{"step": "x", "loss": 1}\n{"step": -5, "loss": 1}\n{"loss": 1}\n{"step"')
    else:
        run.history.write_text('{"event": "begun"}\n{"event": ["x"]}\n[1]\n{"event": "ended", "state": 3}\n{')


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("empty", "there is no job.json"),
        ("job", "job.json is damaged: it is not JSON"),
        ("plan", "plan.json"),
        ("metrics", None),
        ("history", None),
        ("checkpoints", None),
    ],
)
def test_a_damaged_run_is_a_row_and_can_be_shown(make: Any, kind: str, reason: str | None) -> None:
    damage_of(kind, make("a"))
    make("b", saved=(3,))
    assert state("b") == ("finished", "")
    if reason is None:
        assert state()[0] == "unknown"
    else:
        assert state()[0] == "unreadable"
        assert state()[1].startswith(reason)
    shown = show(Path("a"))
    assert [str(line) for line in run_tables.details(shown, NOW, unicode=True)]


def test_steps_that_were_repeated_count_once(make: Any) -> None:
    run = make("a", losses=[5.0, 4.0, float("nan"), 3.0])
    with run.metrics.open("a") as file:
        file.write('{"restart": 1, "from_step": 2, "ranks": 2}\n')
    assert (overview(WORK)[0].step, list(show(None).losses)) == (2, [0, 1])
    with run.metrics.open("a") as file:
        file.write('{"step": 2, "loss": 2.5}\n{"step": 3, "evaluation_loss": 7.0, "samples": 8}\n')
    shown = show(None)
    assert shown.losses == {0: 5.0, 1: 4.0, 2: 2.5}
    assert (shown.row.step, shown.row.loss, shown.evaluations) == (3, 2.5, {3: 7.0})


def test_a_run_is_named_by_its_name_or_directory_and_a_wrong_name_is_corrected(make: Any, tmp_path: Path) -> None:
    make("20260101-000000")
    newest = make("20260102-000000")
    (tmp_path / "elsewhere").mkdir()
    assert locate(None, WORK)[1] == newest.path
    assert locate(Path("20260101-000000"), WORK)[0] == "20260101-000000"
    assert locate(newest.path, WORK)[0] == "20260102-000000"
    with pytest.raises(RunError, match="no run '20260102-00000'") as caught:
        locate(Path("20260102-00000"), WORK)
    assert caught.value.remedy.startswith("20260102-000000")
    with pytest.raises(RunError, match="elsewhere is not a run"):
        locate(Path("elsewhere"), WORK)
    with pytest.raises(RunError, match="there is no run in"):
        locate(None, tmp_path / "nothing")


def test_the_next_command_depends_on_state_and_checkpoints(make: Any) -> None:
    run = make("a")
    history.append(run, begun())
    assert "--resume" not in show(None).next[0]  # nothing to resume from
    (run.checkpoints / "step-00000002").mkdir(parents=True)
    assert "--resume --run-dir .autopipe/runs/a" in show(None).next[0]
    history.append(run, Ended("finished", 3))
    assert show(None).next[0].startswith("autopipe export .autopipe/runs/a -o")
    assert show(None).next[1].endswith("--steps 6")


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [("net.py:optimizer", "net.py:optimizer"), ("", "that of the model file, or AdamW")],
)
def test_the_optimizer_that_trained_is_shown(make: Any, recorded: str, shown: str) -> None:
    run = make("a")
    run.write_job(Job(steps=3, epochs=0, batch_size=16, chosen_optimizer=recorded))
    assert f"  optimizer  {shown}" in run_tables.details(show(None), NOW, unicode=False)


@pytest.mark.parametrize(("width", "lacking"), [(140, set()), (80, {"samples/s", "checkpoint"})])
def test_the_table_fits_the_terminal(make: Any, width: int, lacking: set[str]) -> None:
    make("20260101-000000", saved=(3,))
    table, *_ = run_tables.overview(overview(WORK), NOW, width)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    text = console.export_text()
    assert {name for name in ("samples/s", "checkpoint", "run", "state", "step") if name not in text} == lacking
    assert "20260101-000000" in text


@pytest.mark.parametrize(("unicode", "line"), [(True, "█▅▁"), (False, "#=_")])
def test_a_sparkline_spans_its_values(unicode: bool, line: str) -> None:
    assert run_tables.sparkline([3.0, 2.0, 1.0], unicode=unicode) == line
    assert len(run_tables.sparkline(list(range(1000)), unicode=unicode)) == run_tables.SPARKLINE
    assert set(run_tables.sparkline([2.0, 2.0], unicode=unicode)) == {line[-1]}


def test_only_the_end_of_long_metrics_is_read(make: Any) -> None:
    run = make("a", losses=[1.0] * 5000)
    last = list(read_rows(run.metrics, 300))
    assert 1 < len(last) < 10
    assert [row["step"] for row in last] == list(range(5000 - len(last), 5000))
    assert len(list(read_rows(run.metrics))) == 5000
    assert overview(WORK)[0].step == 5000

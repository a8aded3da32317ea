"""`autopipe report`: which run it shows, what it says is missing, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.reports.pages import metrics, peaks, slower
from support.stored_profiles import HERE, stored_profile

import autopipe
from autopipe.cli.main import autopipe as command
from autopipe.ir import artifact
from autopipe.ir.plan import Plan
from autopipe.planning.cost.predict import RunCosts
from autopipe.report.page.timelines import OPS
from autopipe.runtime.job import Job, RunDirectory


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command in a folder with a profile and no model file."""
    monkeypatch.chdir(tmp_path)
    artifact.save(stored_profile(), Path(".autopipe/profile.json"))

    def call(*args, code=0):
        done = CliRunner().invoke(command, args)
        assert done.exit_code == code, done.output
        return done

    return call


def data_of(path="report.html"):
    text = Path(path).read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    return json.loads(data)


def trained(run, name="20261121-105804", *, costs=True, timeline=True, rows=True):
    """Write a run of the stored plan, as `train` does, with the given files."""
    run("plan", "--gpus", "2", "--replicas", "never", "--num-microbatches", "4", *HERE)
    profile, plan = stored_profile(), artifact.load(Plan, Path(".autopipe/plan.json"), renew="")
    directory = RunDirectory(Path(".autopipe/runs") / name)
    directory.write(Job(steps=30, epochs=0, batch_size=16), plan, profile.graph)
    record = json.loads(Path(".autopipe/plan-record.json").read_text())
    assert record["plan_digest"] == plan.digest
    from autopipe.commands.store import Store

    _, stored = Store(Path(".autopipe")).stored_plan()
    stored_costs = RunCosts.of(plan, profile, stored.cluster, {"torch": "2.12.0"})
    if costs:
        artifact.save(stored_costs, directory.costs)
    if timeline:
        artifact.save(slower(stored_costs.timeline(plan, profile.graph)), directory.timeline)
    if rows:
        lines = [json.dumps(row) for row in (*metrics(30), *peaks(plan))]
        directory.metrics.write_text("\n".join([*lines, '{"step": 99, "lo']))
    return directory


def test_without_runs_the_page_is_of_the_plan(run):
    run("plan", "--gpus", "2", "--replicas", "never", *HERE)
    document = json.loads(run("report", "--json").stdout)
    assert document["run_dir"] == ""
    assert document["bytes"] == Path("report.html").stat().st_size
    assert set(document["missing"]) == {"measured", "memory", "curves"}
    simulated = json.loads(run("simulate", "--json").stdout)
    gantt = data_of()["gantt"]
    assert gantt["measured"] is None
    bars = sum(row["count"] for row in gantt["predicted"]["rows"])
    assert bars == len(json.loads(Path(".autopipe/timeline.json").read_text())["spans"])
    assert gantt["predicted"]["seconds"] == pytest.approx(simulated["predicted"]["step_seconds"])
    text = Path("report.html").read_text()
    assert "above the lower bound of" in text
    assert "single device" in text
    assert text.count("which has not been trained") == 4


def test_a_run_has_its_measurements_and_the_prediction_of_its_own_plan(run):
    directory = trained(run)
    document = json.loads(run("report", "--json", "-o", "page.html").stdout)
    assert (document["run_dir"], document["steps"], document["missing"]) == (str(directory.path), 30, {})
    first = data_of("page.html")
    assert len(first["gantt"]["measured"]["rows"]) == 2
    assert OPS[0] == first["gantt"]["ops"][0]
    run("plan", "--gpus", "4", "--replicas", "never", *HERE)  # the work directory has another plan now
    document = json.loads(run("report", directory.path.name, "--json", "-o", "page.html").stdout)
    assert set(document["missing"]) == {"explanation"}
    assert "now those of another run" in document["missing"]["explanation"]
    assert data_of("page.html")["gantt"] == first["gantt"]
    assert "torch 2.12.0" in Path("page.html").read_text()


def test_a_run_directory_of_another_work_directory_has_its_own_plan(run, tmp_path, monkeypatch):
    directory = trained(run)
    path = directory.path.resolve()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    document = json.loads(run("report", str(path), "--json").stdout)
    assert document["missing"] == {}
    text = Path("report.html").read_text()
    assert str(tmp_path) not in text


def test_what_a_run_has_not_measured_is_missing_with_the_option_that_measures_it(run):
    trained(run, timeline=False, rows=False, costs=False)
    done = run("report", "--json")
    missing = json.loads(done.stdout)["missing"]
    assert set(missing) == {"measured", "memory", "curves"}
    assert "--timeline" in missing["measured"]
    assert "--measure-memory" in missing["memory"]
    run("plan", "--gpus", "4", "--replicas", "never", *HERE)
    missing = json.loads(run("report", "--json").stdout)["missing"]
    assert missing["predicted"].startswith("the run has no costs.json, and the profile and the plan")
    assert data_of()["gantt"]["predicted"] is None


def test_the_newest_run_is_the_default_and_plan_the_plan(run):
    trained(run, "20261121-100000")
    later = trained(run, "20261121-110000", rows=False)
    assert json.loads(run("report", "--json").stdout)["run_dir"] == str(later.path)
    assert json.loads(run("report", "plan", "--json").stdout)["run_dir"] == ""


@pytest.mark.parametrize(
    ("name", "damage", "shown"),
    [
        ("timeline.json", "{", "timeline.json is damaged: it is not JSON"),
        ("costs.json", "{}", "costs.json is damaged"),
        ("plan.json", None, "there is no plan.json"),
        ("graph.json", None, "there is no graph.json"),
        ("job.json", "[]", "job.json is damaged"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name(run, name, damage, shown):
    path = trained(run).path / name
    if damage is None:
        path.unlink()
    else:
        path.write_text(damage)
    done = run("report", code=1)
    assert shown in done.stderr
    assert str(path) in done.stderr
    assert not Path("report.html").exists()


def test_costs_of_another_plan_are_refused(run):
    directory = trained(run)
    costs = artifact.load(RunCosts, directory.costs, renew="")
    artifact.save(dataclasses.replace(costs, plan_digest="0" * 16), directory.costs)
    assert "costs.json and plan.json do not belong together" in run("report", code=1).stderr


def test_an_unknown_run_is_refused_with_the_nearest_name(run):
    trained(run, "20261121-105804")
    done = run("report", "20261121-105805", code=1)
    assert "20261121-105804" in done.stderr
    Path("folder").mkdir()
    assert "folder is not a run: it has no job.json" in run("report", "folder", code=1).stderr
    assert "is a folder" in run("report", "-o", "folder", code=1).stderr


def test_without_a_plan_the_command_to_make_one_is_named(run):
    assert "autopipe plan" in run("report", code=1).stderr
    assert "autopipe train" in run("report", "20261121-105804", code=1).stderr


def test_the_method_writes_the_same_page(run):
    trained(run)
    run("report", "-o", "one.html")
    result = autopipe.Pipeline().report("two.html", "20261121-105804")
    assert Path("one.html").read_text() == Path(result.path).read_text()
    assert (result.steps, result.missing) == (30, {})
    with pytest.raises(autopipe.RunError, match="there is no run"):
        autopipe.Pipeline().report("two.html", "2026112")

"""Schedules on the command line: the options of each, and custom orders."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.samples import SAMPLES
from support.stored_profiles import HERE, stored_profile

from autopipe.cli.main import autopipe
from autopipe.ir import artifact
from autopipe.ir.plan import Plan

GRID = "# rank 0, then rank 1\n0F0,0F1,,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command in a folder with a profile and no model file."""
    monkeypatch.chdir(tmp_path)
    artifact.save(stored_profile(), Path(".autopipe/profile.json"))
    Path("grid.csv").write_text(GRID)

    def call(*args, code=0):
        done = CliRunner().invoke(autopipe, args)
        assert done.exit_code == code, done.output
        return done

    return call


def stored():
    return artifact.load(Plan, Path(".autopipe/plan.json"), renew="")


def test_options_of_a_schedule_are_stored_until_another_schedule_is_named(run):
    run("plan", "--gpus", "4", *HERE, "--schedule", "PipeDream", "--vertical-sync", "--warmup-depth", "2")
    assert stored().schedule_options == {"vertical_sync": 1, "depth": 2}
    run("plan", "--gpus", "2", *HERE, "--schedule", "interleaved", "--stages-per-rank", "3")
    assert stored().schedule_options == {"stages_per_rank": 3}
    assert [stage.ranks for stage in stored().stages] == [(0,), (1,)] * 3


def test_a_grid_is_the_plan_and_its_simulation(run):
    document = json.loads(run("plan", *HERE, "--schedule-file", "grid.csv", "--json").stdout)
    assert (document["schedule"], document["num_microbatches"], len(document["stages"])) == ("custom", 2, 2)
    assert stored().schedule_text == GRID
    simulated = json.loads(run("simulate", "--json").stdout)
    assert simulated["grid"].splitlines()[1].split() == ["rank", "1", "|", "F0", "B0", "F1", "B1+"]


def test_a_wrong_grid_is_shown_with_the_cell_marked_and_nothing_is_planned(run):
    Path("grid.csv").write_text(GRID.replace("1F0,1B0", "1B0,1F0"))
    done = run("plan", *HERE, "--schedule-file", "grid.csv", code=1)
    assert "[backward-after-forward] custom: 1B0@0 comes before its F" in done.stderr
    assert "rank 1 | >1B0@0< 1F0@0" in done.stderr
    assert not Path(".autopipe/plan.json").exists()
    done = run("plan", *HERE, "--schedule-file", "grid.csv", "--json", code=1)
    assert ">1B0@0<" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--schedule", "custom", "--gpus", "2"), "--schedule-file"),
        (
            ("--schedule", "1f1b", "--schedule-file", "grid.csv"),
            "--schedule 1f1b and --schedule-file grid.csv give two different orders",
        ),
        (("--schedule-file", "grid.csv", "--gpus", "3"), "has 2 rows, one per rank, but --gpus is 3"),
        (("--schedule", "1f1b", "--gpus", "2", "--vertical-sync"), "a schedule that does: pipedream"),
    ],
)
def test_contradicting_options_are_refused_with_a_remedy(run, args, message):
    assert message in run("plan", *HERE, *args, code=1).stderr


def test_a_plan_is_simulated_under_the_requested_schedule(run):
    run("plan", "--gpus", "4", *HERE, "--num-microbatches", "4", "--schedule", "1f1b")
    done = run("simulate", "--schedule", "interleaved", "--stages-per-rank", "2")
    assert "simulated with interleaved, stages_per_rank 2, the same stages on 2 ranks" in done.stderr
    assert len([text for text in done.stdout.splitlines() if text.startswith("rank ")]) == 2
    done = run("simulate", "--schedule", "pipedream", "--vertical-sync")
    assert "simulated with pipedream, vertical_sync 1, the same stages" in done.stderr


def test_auto_lists_the_schedules_that_it_did_not_try(run):
    known = run("plan", "--gpus", "2", *HERE, "--explain").stdout
    assert "zero-bubble was not considered: the profile has no times of the two halves" in " ".join(known.split())
    assert "interleaved was not considered" not in known


def test_training_with_a_grid_is_plain_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("grid.csv").write_text("0F0,3F0,3B0,0B0,0F1,3F1,3B1,0B1\n1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1\n")
    done = CliRunner().invoke(
        autopipe,
        [
            *("check", str(SAMPLES / "unet.py"), "--schedule-file", "grid.csv", "--batch-size", "4", "--json"),
            *("--device", "cpu", "--microbatch-sizes", "2"),
        ],
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["bitwise"]
    assert [stage.ranks for stage in stored().stages] == [(0,), (1,), (1,), (0,)]

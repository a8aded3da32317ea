"""The commands one after another on a small model: their files, messages and JSON."""

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support.commands import fix_costs

from autopipe.cli.main import autopipe

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=16, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)


def build_model(width=16, layers=4):
    return Net(width, layers)


def loss(output, target):
    return nn.functional.cross_entropy(output, target)


def data(batch_size=8):
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield torch.randn(batch_size, 16, generator=generator), torch.randint(0, 3, (batch_size,), generator=generator)


evaluate_data = data
"""


def run(*args):
    done = CliRunner().invoke(autopipe, list(args))
    assert done.exit_code == 0, done.output
    return done


def document(*args):
    answer = json.loads(run(*args, "--json").stdout)
    assert answer["schema_version"] == 1
    return answer


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Return a folder in which net.py is profiled and planned for two ranks."""
    folder = tmp_path_factory.mktemp("flow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("net.py").write_text(MODEL)
        run("profile", "net.py", "--device", "cpu", "--microbatch-sizes", "2,4")
        run("plan", "--gpus", "2", "--schedule", "1f1b", "--num-microbatches", "4")
    return folder


@pytest.fixture
def folder(planned, tmp_path, monkeypatch):
    """Return a copy of the planned folder for one test."""
    import shutil

    shutil.copytree(planned, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_profile_writes_its_file_and_prints_what_it_measured(folder):
    answer = document("profile", "net.py", "--device", "cpu", "--microbatch-sizes", "2")
    assert [m["microbatch_size"] for m in answer["measurements"]] == [2]
    assert answer["nodes"] > 8
    assert answer["parameters"] == 4 * (4 * (16 * 16 + 16) + 3 * 16 + 3)
    assert Path(".autopipe/profile.json").is_file()


def test_plan_json_has_the_documented_keys(folder):
    answer = document("plan", "--gpus", "2", "--num-microbatches", "4", "--explain")
    keys = {"stages", "boundaries", "schedule", "num_microbatches", "microbatch_size", "recompute", "predicted"}
    assert set(answer) >= keys | {"planning_seconds"}
    keys = {"index", "ranks", "replicas", "first", "last", "seconds", "peak_bytes", "parameters"}
    assert all(set(stage) >= keys for stage in answer["stages"])
    assert [stage["ranks"] for stage in answer["stages"]] == [[0], [1]]
    assert all(boundary["bytes"] > 0 for boundary in answer["boundaries"])
    keys = {"step_seconds", "samples_per_second", "bubble_fraction", "bottleneck_seconds"}
    assert set(answer["predicted"]) >= keys
    assert (answer["num_microbatches"], answer["microbatch_size"]) == (4, 2)
    named = [name for stage in answer["stages"] for name in stage["parameters"]]
    assert sorted(named) == sorted(
        f"{m}.{p}" for m in ("head", *(f"layers.{i}" for i in range(4))) for p in ("bias", "weight")
    )
    assert any("runner-up" in line for line in answer["explanation"])


def test_generate_and_simulate_use_the_stored_plan(folder):
    assert document("generate")["files"] == [".autopipe/stages/stage_0.py", ".autopipe/stages/stage_1.py"]
    answer = document("simulate", "--schedule", "gpipe")
    assert answer["schedule"] == "gpipe"
    assert answer["grid"].count("rank") == 2
    assert answer["seconds"] == pytest.approx(answer["predicted"]["step_seconds"])
    assert Path(".autopipe/timeline.json").is_file()
    assert "rank 1 |" in run("simulate").stdout


def test_a_plan_that_cannot_fit_is_refused_with_the_numbers(folder):
    done = CliRunner().invoke(autopipe, ["plan", "--gpus", "2", "--gpu-memory", "1KiB", "--link", "1GB/s"])
    assert done.exit_code == 1
    assert "1 KiB are available" in done.stderr
    assert "  try: " in done.stderr


def test_more_ranks_than_cuts_are_refused(folder):
    done = CliRunner().invoke(autopipe, ["plan", "--gpus", "64", "--batch-size", "64"])
    assert done.exit_code == 1
    assert "64" in done.stderr


def test_check_compares_every_parameter(folder):
    answer = document("check", "--steps", "2")
    assert answer["equal"] is True
    assert answer["bitwise"] is True
    assert answer["max_relative_error"] == 0
    assert {"name", "error", "owner"} <= set(answer["parameters"][0])
    assert answer["warnings"] == []


def test_a_plan_with_replicas_trains_equally_up_to_rounding(folder):
    # one layer takes much longer than all others together, so the plan replicates it
    fix_costs(Path(".autopipe"), lambda node: 1.0 if node == 1 else 1e-3)
    answer = document("plan", "--gpus", "3", "--replicas", "auto", "--num-microbatches", "4")
    assert max(stage["replicas"] for stage in answer["stages"]) > 1
    answer = document("check", "--steps", "2")
    assert answer["equal"] is True
    assert answer["max_relative_error"] < 1e-6


def test_train_export_and_eval_produce_weights_for_the_unchanged_model(folder):
    answer = document("train", "--steps", "3", "--run-dir", "here")
    assert len(answer["losses"]) == answer["steps"] == 3
    assert (answer["ranks"], answer["stages"], answer["schedule"], answer["run_dir"]) == (2, 2, "1f1b", "here")
    assert answer["samples_per_second"] > 0
    assert Path(answer["checkpoint"]).is_dir()
    for name in ("net.safetensors", "net.pt"):
        assert document("export", "here", "-o", name)["tensors"] == 10
    namespace = {}
    exec(compile(MODEL, "net.py", "exec"), namespace)
    model = namespace["build_model"]()
    model.load_state_dict(load_file("net.safetensors"), strict=True)
    weights = torch.load("net.pt", weights_only=True)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    evaluated = document("eval", "here")
    model.eval()
    losses = [namespace["loss"](model(x), y).item() for x, y in namespace["data"]()]
    assert evaluated["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert (evaluated["samples"], evaluated["step"]) == (32, 3)


def test_train_reports_a_new_epoch_and_the_prediction(folder):
    done = run("train", "--steps", "6")
    assert done.stderr.count("the data ended after 4 minibatches; reading it again from the start") == 1
    assert re.search(r"samples/s \(predicted: \d+\.\d\)", done.stdout)
    assert "reading it again" not in run("train", "--epochs", "2").stderr


def test_by_default_the_fastest_plan_with_or_without_replicas_is_trained(folder, monkeypatch):
    monkeypatch.delenv("AUTOPIPE_REPLICAS")
    more = ("--gpus", "2", "--device", "cpu", "--microbatch-sizes", "2", "--work-dir", "fresh")
    plan = document("plan", "net.py", *more)
    contenders = {c["name"]: c["plan"] for c in plan["comparison"]["contenders"]}
    fastest = min(c["predicted"]["step_seconds"] for c in contenders.values() if c is not None)
    assert plan["predicted"]["step_seconds"] <= fastest * (1 + 1e-3)
    assert document("check", "--work-dir", "fresh")["equal"] is True
    trained = document("train", "--work-dir", "fresh", "--steps", "2")
    assert (trained["ranks"], trained["stages"]) == (plan["ranks"], len(plan["stages"]))


def test_train_reports_which_files_it_reuses_and_renews(folder):
    done = document("train", "--steps", "1")
    first = done["notes"]
    assert "optimizer: AdamW, lr 0.001 (net.py has no `optimizer`)" in first
    assert document("show", done["run_dir"])["options"]["chosen_optimizer"] == "AdamW, lr 0.001"
    assert any("profile of net.py" in note and "reused" in note for note in first)
    options = "--schedule 1f1b, --num-microbatches 4, from an earlier command"
    assert any(note.startswith(f"plan of 2 ranks (1f1b) reused: {options}") for note in first)
    assert any(note.startswith("wrote 2 stage files") for note in first)
    second = document("train", "--steps", "1")["notes"]
    assert "stage files reused" in second
    contradicted = document("train", "--steps", "1", "--gpus", "3")
    assert any("--gpus 2 -> 3" in note for note in contradicted["notes"])
    assert (contradicted["ranks"], contradicted["schedule"]) == (3, "1f1b")
    assert any("plan of 3 ranks" in note for note in document("train", "--steps", "1")["notes"])


def test_a_different_model_makes_profile_and_plan_stale(folder):
    done = document("train", "net.py", "--arg", "layers=3", "--steps", "1", "--gpus", "2", "--device", "cpu")
    assert any("the model changed" in note or "options of the model changed" in note for note in done["notes"])
    assert any(note.startswith("profiled ") for note in done["notes"])
    refused = CliRunner().invoke(autopipe, ["generate"])
    assert refused.exit_code == 0


def test_an_edited_model_file_is_noticed_by_generate(folder):
    Path("net.py").write_text(MODEL.replace("x + torch.relu", "x + torch.tanh"))
    done = CliRunner().invoke(autopipe, ["generate"])
    assert done.exit_code == 1
    assert "the model is now" in done.stderr
    assert "autopipe plan net.py --gpus 2" in done.stderr


def test_a_seed_changes_its_run_but_not_the_plan_or_the_next_run(folder):
    first = document("train", "--steps", "1")
    other = document("train", "--steps", "1", "--seed", "7")
    assert any("plan of 2 ranks (1f1b) reused" in note for note in other["notes"])
    assert first["losses"] != other["losses"]
    assert document("train", "--steps", "1")["losses"] == first["losses"]


def test_a_damaged_plan_is_refused_with_the_command_that_renews_it(folder):
    Path(".autopipe/plan.json").write_text("{")
    refused = CliRunner().invoke(autopipe, ["train", "--steps", "1", "--gpus", "2"])
    assert refused.exit_code == 1
    assert "plan.json" in refused.stderr
    assert "try: autopipe plan TARGET --gpus N" in refused.stderr
    assert CliRunner().invoke(autopipe, ["plan", "net.py", "--gpus", "2"]).exit_code == 0
    assert CliRunner().invoke(autopipe, ["train", "--steps", "1", "--gpus", "2"]).exit_code == 0


def test_a_batch_size_for_data_that_takes_none_is_an_error(folder):
    Path("net.py").write_text(MODEL.replace("def data(batch_size=8):", "def data():\n    batch_size = 8"))
    done = CliRunner().invoke(autopipe, ["plan", "net.py", "--gpus", "2", "--batch-size", "16"])
    assert done.exit_code == 1
    assert "batch" in done.stderr
    assert "data" in done.stderr

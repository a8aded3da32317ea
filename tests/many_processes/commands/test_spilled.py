"""Spilled training through the commands: equal to training without it, also when resumed, killed or evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.commands import Commands, kill_ranks, training, write_model

BUDGET = "40KiB"
SPILLED = ("--gpu-memory", BUDGET)


def state(commands: Commands, run: str) -> dict[str, torch.Tensor]:
    """Return all tensors of the newest checkpoint of a run."""
    newest = max((commands.folder / run / "checkpoints").glob("step-????????"))
    tensors: dict[str, torch.Tensor] = {}
    for path in newest.glob("*.safetensors"):
        tensors.update(load_file(path))
    return tensors


def assert_same(commands: Commands, run: str, other: str) -> None:
    one, two = state(commands, run), state(commands, other)
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_training_within_a_budget_equals_training_without(commands: Commands, tmp_path: Path) -> None:
    write_model(tmp_path, steps=6)
    words = training(1, steps=6, schedule="spilled")
    trained = commands.document(*words, *SPILLED, "--measure-memory", "--eval-every", "3")
    assert trained["schedule"] == "spilled" and trained["stages"] > 2
    commands.run(*training(1, steps=6, run="plain"), "--gpu-memory", "1GiB")
    assert_same(commands, "run", "plain")
    budget = 40 * 2**10
    assert 0 < max(peak["bytes"] for peak in trained["peaks"]) <= budget
    for direction in trained["copied"]:
        assert direction["bytes"] == pytest.approx(direction["planned_bytes"], rel=0.1)
    assert [direction["to"] for direction in trained["copied"]] == ["device", "host"]


def test_runs_resume_from_and_to_other_plans(commands: Commands, tmp_path: Path) -> None:
    write_model(tmp_path)
    commands.run(*training(1, steps=6, run="plain"), "--gpu-memory", "1GiB")
    clip = ("--clip-grad-norm", "0.5")
    commands.run(*training(1, steps=6, run="clipped"), "--gpu-memory", "1GiB", *clip)
    for run, options, expected in (("run", (), "plain"), ("run2", clip, "clipped")):
        commands.run(*training(1, steps=2, run=run, schedule="spilled"), *SPILLED, *options)
        commands.run(*training(2, steps=4, run=run), "--gpu-memory", "1GiB", "--resume", *options)
        out, _ = commands.run(*training(1, steps=6, run=run, schedule="spilled"), *SPILLED, "--resume", *options)
        assert "copied a step" not in out or "planned" in out
        assert_same(commands, run, expected)


def test_a_killed_rank_restarts_to_equal_weights(commands: Commands, tmp_path: Path) -> None:
    write_model(tmp_path)
    commands.run(*training(1, steps=6, run="plain"), "--gpu-memory", "1GiB")
    kill_ranks(tmp_path / "model.py", {3: 0})
    words = training(1, steps=6, schedule="spilled")
    trained = commands.document(*words, *SPILLED, "--checkpoint-every", "1", "--max-restarts", "1", "--no-check")
    assert len(trained["restarts"]) == 1
    assert_same(commands, "run", "plain")


def test_the_plan_says_what_spilling_costs_and_two_ranks_are_refused(commands: Commands, tmp_path: Path) -> None:
    write_model(tmp_path)
    _, err = commands.run("train", "model.py", "--gpus", "1", "--gpu-memory", BUDGET, "--steps", "1", code=1)
    assert "or keep the weights on the host (--schedule spilled --gpus 1)" in err
    out, _ = commands.run("plan", "model.py", "--schedule", "spilled", "--gpu-memory", BUDGET, "--explain")
    assert "Without spilling, the model does not fit" in out and "bound by" in out
    commands.run("simulate", "--trace", "trace.json")
    names = {event["args"].get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert len(names) > 1
    _, err = commands.run("plan", "model.py", "--schedule", "spilled", "--gpus", "2", code=1)
    assert "spilled uses one device, and 2 are requested" in err
    _, err = commands.run("plan", "model.py", "--schedule", "spilled", "--gpu-memory", "4KiB", code=1)
    assert "the device has 4.00 KiB" in err

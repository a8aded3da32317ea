"""A run that is asked to stop saves and can be resumed; a killed one restarts: both with equal weights."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.commands import EACH, Commands, assert_gone, descendants, kill_ranks, training, wait_for_steps, write_model


def state(commands: Commands, run: str) -> dict[str, torch.Tensor]:
    """Return all tensors of the newest checkpoint of a run."""
    newest = max((commands.folder / run / "checkpoints").glob("step-????????"))
    weights: dict[str, torch.Tensor] = {}
    for path in newest.glob("*.safetensors"):
        weights.update(load_file(path))
    return weights


def assert_undisturbed(commands: Commands, run: str, steps: int, schedule: str = "1f1b") -> None:
    """Assert that weights and optimizer state equal those of an uninterrupted run of as many steps."""
    commands.run(*training(steps=steps, run="undisturbed", schedule=schedule))
    expected, actual = state(commands, "undisturbed"), state(commands, run)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def leftovers(run: Path) -> list[str]:
    return [path.name for path in (run / "checkpoints").iterdir() if path.suffix in (".tmp", ".old")]


@pytest.mark.parametrize(
    ("number", "schedule"),
    [(signal.SIGTERM, "1f1b"), (signal.SIGUSR1, "pipedream"), (signal.SIGINT, "gpipe")],
)
def test_a_stopped_run_resumes_to_equal_weights(
    commands: Commands, tmp_path: Path, number: signal.Signals, schedule: str
) -> None:
    words = training(steps=1_000_000, schedule=schedule)
    process = commands.start(*words, "--json")
    wait_for_steps(tmp_path / "run", process)
    family = descendants(process.pid)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    assert_gone(family)
    document = json.loads(out)
    assert document["stopped"] is True
    assert len(document["losses"]) == document["step"]
    assert document["checkpoint"].endswith(f"step-{document['step']:08d}")
    assert f"{number.name}: stopping after the current minibatch" in err
    assert f"stopped cleanly at step {document['step']}, with a checkpoint" in err
    assert "next: the same command with --resume" in err
    assert leftovers(tmp_path / "run") == []
    # torch's compiler creates an empty cache folder when it is imported
    assert [path for path in commands.temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
    steps = document["step"] + 7
    second = commands.document(*training(steps=steps, schedule=schedule), "--resume")
    assert (len(second["losses"]), second["step"], second["stopped"]) == (7, steps, False)
    assert_undisturbed(commands, "run", steps, schedule)


def test_a_second_ctrl_c_ends_the_run_immediately(commands: Commands, tmp_path: Path) -> None:
    process = commands.start(*training(steps=1_000_000))
    ranks = wait_for_steps(tmp_path / "run", process)
    family = descendants(process.pid)
    ranks[0].suspend()  # so that the run cannot stop cleanly
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "stopping after" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    assert_gone(ranks)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert_gone(family)


def test_a_killed_rank_causes_a_restart_from_the_last_checkpoint(commands: Commands, tmp_path: Path) -> None:
    kill_ranks(tmp_path / "model.py", {12: 1, 21: 0})
    out, err = commands.run(*training(steps=30), "--checkpoint-every", "5", *EACH, "--max-restarts", "2", "--json")
    document = json.loads(out)
    assert [restart["number"] for restart in document["restarts"]] == [1, 2]
    assert [restart["rank"] for restart in document["restarts"]] == [1, 0]
    assert all("SIGKILL" in restart["what"] and restart["from_step"] % 5 == 0 for restart in document["restarts"])
    assert "restart 1 of 2, from the checkpoint of step" in err
    assert len(document["losses"]) == document["step"] == 30
    assert leftovers(tmp_path / "run") == []
    assert_undisturbed(commands, "run", 30)


def test_an_elastic_run_continues_with_the_remaining_ranks(commands: Commands, tmp_path: Path) -> None:
    kill_ranks(tmp_path / "model.py", {12: 2})
    document = commands.document(*training(3, steps=30), "--checkpoint-every", "5", *EACH, "--elastic")
    assert [restart["ranks"] for restart in document["restarts"]] == [2]
    assert (document["ranks"], document["stages"], document["step"]) == (2, 2, 30)
    assert_undisturbed(commands, "run", 30)


def test_the_same_failure_without_progress_is_not_tried_a_third_time(commands: Commands, tmp_path: Path) -> None:
    write_model(tmp_path, bad=4)
    _, err = commands.run(*training(steps=20), "--max-restarts", "5", code=3)
    assert err.count("restart ") == 1
    assert "restart 1 of 5, from the beginning" in err
    assert "index out of range" in err


def test_a_second_run_in_a_directory_is_refused_with_the_first_process(commands: Commands, tmp_path: Path) -> None:
    process = commands.start(*training(steps=1_000_000))
    wait_for_steps(tmp_path / "run", process)
    _, err = commands.run(*training(steps=5), code=1)
    assert f"run is in use: process {process.pid} " in err


def test_a_damaged_checkpoint_is_refused_and_an_earlier_one_can_be_resumed(commands: Commands, tmp_path: Path) -> None:
    commands.run(*training(steps=4), "--checkpoint-every", "1", "--keep-checkpoints", "0")
    path = tmp_path / "run" / "checkpoints" / "step-00000004" / "stage-1-of-2.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    _, err = commands.run(*training(steps=6), "--resume", code=1)
    assert "the checkpoint of step 4 is damaged: stage-1-of-2.safetensors is not what was written" in err
    assert "--resume 3 (intact: 1, 2, 3)" in err
    assert "training on" not in err
    _, err = commands.run(*training(steps=6), "--resume", "2")
    assert "moved later checkpoints (3, 4) aside" in err
    assert_undisturbed(commands, "run", 6)


def test_a_changed_model_is_refused_with_its_first_parameter(commands: Commands, tmp_path: Path) -> None:
    commands.run(*training(steps=2))
    model = tmp_path / "model.py"
    model.write_text(model.read_text().replace("WIDTH = 32", "WIDTH = 48"))
    artifacts = {
        path: path.read_bytes() for path in (tmp_path / ".autopipe").rglob("*") if path.suffix in (".json", ".py")
    }
    _, err = commands.run(*training(steps=4), "--resume", code=1)
    assert artifacts and all(path.read_bytes() == content for path, content in artifacts.items())
    assert "the checkpoint belongs to another model: first.0.weight was [32, 8] and is [48, 8]" in err
    for words in (["export", "run", "-o", "x.pt"], ["eval", "run"]):
        _, err = commands.run(*words, code=1)
        assert "the model has changed since this run: first.0.weight was [32, 8] and is [48, 8]" in err


def test_resume_takes_an_optional_step(commands: Commands) -> None:
    commands.run(*training(steps=2))
    words = training(steps=3)
    commands.run("train", "--resume", *words[1:])
    assert commands.document("train", "--resume", "2", *words[1:])["step"] == 3


ASKED = (["--device-name", "H100-SXM"], ["--link", "1GB/s"], ["--gpu-memory", "999TiB"])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.json")}


def test_a_question_changes_nothing_and_a_run_keeps_its_plan_and_length(commands: Commands, tmp_path: Path) -> None:
    commands.run(*training(2, steps=2, run="run"))
    work, run = tmp_path / ".autopipe", tmp_path / "run"
    before, plan = contents(work), (run / "plan.json").read_bytes()
    for words in ASKED:
        _, err = commands.run("plan", "model.py", "--gpus", "2", *words)
        assert "an answer to a question (" in err and "next: autopipe simulate, or on such devices" in err
        assert contents(work) == before
    out, _ = commands.run("simulate")
    assert out and (work / "question" / "timeline.json").is_file()
    document = commands.document("train", "model.py", "--run-dir", "run", "--resume")
    assert (document["steps"], document["losses"]) == (0, [])
    # another plan of this machine, of other stages, is not the run's
    commands.run("plan", "model.py", "--gpus", "1")
    assert contents(work)["plan.json"] != before["plan.json"]
    document = commands.document("train", "model.py", "--run-dir", "run", "--resume", "--steps", "3")
    assert (document["step"], document["ranks"]) == (3, 2)
    assert (run / "plan.json").read_bytes() == plan

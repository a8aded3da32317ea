"""A rank fails, is killed or is interrupted: within seconds no process remains, and the message names the cause."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.commands import Commands, assert_gone, descendants, stage_label, training, wait_for_steps, write_model

# an optimizer whose third step in a rank requests more memory than any machine has
HUNGRY = """
import multiprocessing

class Hungry(torch.optim.SGD):
    def step(self, closure=None):
        group = self.param_groups[0]
        group["steps"] = group.get("steps", 0) + 1
        if group["steps"] == 3 and multiprocessing.current_process().name.startswith("rank "):
            torch.empty(2**53)
        return super().step(closure)

def optimizer(named_parameters):
    return Hungry([parameter for _, parameter in named_parameters], lr=0.1)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    commands = Commands(tmp_path)

    def begin(*, steps: int, bad: int = -1, ranks: int = 2) -> subprocess.Popen[str]:
        write_model(tmp_path, steps=steps, bad=bad)
        return commands.start(*training(ranks, steps=steps))

    yield begin
    commands.end()


def wait_for_step(folder: Path, process: subprocess.Popen[str]) -> list[psutil.Process]:
    return wait_for_steps(folder / "run", process)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run a model that fails on its sixth minibatch; return the folder and what was reported."""
    folder = tmp_path_factory.mktemp("failed")
    write_model(folder, steps=20, bad=5)
    with Commands(folder) as commands:
        _, err = commands.run(*training(2, steps=20), code=3)
    return folder, err


def test_an_error_of_the_users_code_is_shown_with_rank_stage_and_instruction(failed: tuple[Path, str]) -> None:
    _, err = failed
    assert "index out of range" in err
    assert "stage 1" in err or "stage 0" in err
    assert "F3@5" in err or "F5:3@5" in err
    assert "stage_1.py:" in err or "stage_0.py:" in err
    assert "self.table(" in err
    assert ", which is Net, model.py:" in err
    assert "Connection closed" not in err
    assert "Traceback" not in err


def test_a_killed_rank_is_named_and_no_process_remains(start, tmp_path: Path) -> None:
    process = start(steps=1_000_000)
    ranks = wait_for_step(tmp_path, process)
    assert len(ranks) == 2
    family = descendants(process.pid)
    ranks[1].kill()
    assert_gone(ranks)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 3
    assert "killed by SIGKILL" in err
    assert f"rank 1, {stage_label(tmp_path / 'run', 1)}, instruction" in " ".join(err.split())
    assert_gone(family)


def test_a_killed_supervisor_leaves_no_process(start, tmp_path: Path) -> None:
    process = start(steps=1_000_000)
    wait_for_step(tmp_path, process)
    family = descendants(process.pid)
    process.kill()
    process.wait()
    assert_gone(family)


def test_a_failed_run_keeps_its_metrics(failed: tuple[Path, str]) -> None:
    folder, _ = failed
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]


def test_a_loss_that_is_nan_ends_the_run_with_step_and_checkpoint(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    try:
        write_model(tmp_path, nan=4)
        words = [*training(steps=8), "--checkpoint-every", "1"]
        _, err = commands.run(*words, code=1)
        assert "step 5 is not finite: its loss" in err
        assert "at:  the last checkpoint before it: run/checkpoints/step-00000004" in err
        document = commands.document(*words, "--resume", "--on-nonfinite", "skip")
        assert (document["losses"][0], document["skipped"], document["step"]) == (None, [4], 8)
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "audit" not in line] == list(range(8))
    finally:
        commands.end()


def test_out_of_memory_reports_predicted_and_used_memory_and_a_plan_that_fits(tmp_path: Path) -> None:
    write_model(tmp_path, steps=20, bad=-1)
    model = (tmp_path / "model.py").read_text()
    model += HUNGRY
    (tmp_path / "model.py").write_text(model)
    with Commands(tmp_path) as commands:
        _, err = commands.run(*training(2, steps=20), code=3)
    text = " ".join(err.split())
    assert "out of memory: the plan predicted" in text
    assert re.search(r"tried to allocate [\d.]+ GiB more", text), text
    assert "--gpu-memory" in text
    assert "Traceback" not in err

"""Resume loses nothing: optimizers and schedulers are stopped and resumed under the same plan and under others."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from support.models.resume import CASES, FILE, REFUSED, SAME_STAGES
from support.pipelines import Captured, build, captured_file, minibatches, plan_for
from support.resumed import assert_equal, train, with_hooks

from autopipe.errors import ModelFileError, RunError
from autopipe.verify.restorable import prove_restorable

STEPS, STAGES = 8, 3


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    path = tmp_path_factory.mktemp("net") / "net.py"
    path.write_text(FILE)
    return captured_file(path, (), 8)


def stopped_and_resumed(
    captured: Captured, folder: Path, step: int, stages: int, schedule: str = "1f1b"
) -> dict[str, torch.Tensor]:
    """Train to ``step``, save, and resume in a new run with so many stages."""
    items = minibatches(captured.workload, STEPS, 8)
    if not (folder / "run").exists():
        train(build(captured, plan_for(captured, STAGES, schedule, 2, 8), folder / "run", save=True), items, step)
    shutil.copytree(folder / "run", folder / str(stages))
    plan = plan_for(captured, stages, schedule, 2, 8)
    return train(build(captured, plan, folder / str(stages), save=True, start_step=step), items, STEPS)


def uninterrupted(captured: Captured, folder: Path, schedule: str = "1f1b") -> dict[str, torch.Tensor]:
    plan = plan_for(captured, STAGES, schedule, 2, 8)
    return train(build(captured, plan, folder / "whole"), minibatches(captured.workload, STEPS, 8), STEPS)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_ends_with_the_same_weights(name: str, network: Captured, tmp_path: Path) -> None:
    captured = with_hooks(network, CASES[name], tmp_path)
    draw = random.Random(name)
    step, others = draw.randint(1, STEPS - 1), draw.choice((1, 2, 4))
    expected = uninterrupted(captured, tmp_path)
    for stages in (STAGES, others):
        assert_equal(stopped_and_resumed(captured, tmp_path, step, stages), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("number", range(100))
def test_random_hooks_schedules_steps_and_stages_resume_to_equal_weights(
    number: int, network: Captured, tmp_path: Path
) -> None:
    draw = random.Random(number)
    captured = with_hooks(network, draw.choice([*CASES.values(), *SAME_STAGES.values()]), tmp_path)
    schedule = draw.choice(("gpipe", "1f1b", "zero-bubble", "2bw", "pipedream"))
    # with weight stashing the versions that a stage reads depend on the number of stages; 2bw needs 3 microbatches
    # for 4 stages
    stages = draw.choice({"pipedream": (STAGES,), "2bw": (2, 3)}.get(schedule, (1, 2, 3, 4)))
    expected = uninterrupted(captured, tmp_path, schedule)
    try:
        weights = stopped_and_resumed(captured, tmp_path, draw.randint(1, STEPS - 1), stages, schedule)
    except RunError as error:
        assert stages != STAGES and "differs between the stages" in error.what
        return
    assert_equal(weights, expected)


@pytest.mark.parametrize("name", SAME_STAGES)
def test_state_that_belongs_to_a_stage_resumes_with_the_same_stages(
    name: str, network: Captured, tmp_path: Path
) -> None:
    captured = with_hooks(network, SAME_STAGES[name], tmp_path)
    assert_equal(stopped_and_resumed(captured, tmp_path, 5, STAGES), uninterrupted(captured, tmp_path))
    with pytest.raises(RunError, match="differs between the stages of the checkpoint"):
        stopped_and_resumed(captured, tmp_path, 5, 2)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", [*CASES, *SAME_STAGES])
def test_the_trial_before_a_run_accepts_state_that_can_be_restored(
    name: str, network: Captured, tmp_path: Path
) -> None:
    captured = with_hooks(network, {**CASES, **SAME_STAGES}[name], tmp_path)
    assert prove_restorable(captured.workload) == ""


@pytest.mark.filterwarnings("ignore:unclosed file")
@pytest.mark.parametrize("name", REFUSED)
def test_state_that_no_checkpoint_can_hold_is_refused_before_training(
    name: str, network: Captured, tmp_path: Path
) -> None:
    text, words = REFUSED[name]
    with pytest.raises(RunError, match=words) as caught:
        prove_restorable(with_hooks(network, text, tmp_path).workload)
    assert caught.value.remedy


def test_an_optimizer_that_needs_all_parameters_is_reported_and_not_tried(network: Captured, tmp_path: Path) -> None:
    text = "def optimizer(named):\n    named = dict(named)\n    assert len(named) == 14\n"
    text += "    return torch.optim.SGD(named.values(), lr=0.1)\n"
    captured = with_hooks(network, text, tmp_path)
    shapes = {"layers.0.weight": ((6, 6), torch.float32), "head.bias": ((5,), torch.float32)}
    assert "was not tried" in prove_restorable(captured.workload, shapes)
    assert prove_restorable(captured.workload) == ""


def test_a_scheduler_that_needs_a_metric_is_refused_before_a_run(network: Captured, tmp_path: Path) -> None:
    captured = with_hooks(network, "def scheduler(o):\n    return S.ReduceLROnPlateau(o)\n", tmp_path)
    with pytest.raises(ModelFileError, match="returned a ReduceLROnPlateau, whose step needs an argument"):
        prove_restorable(captured.workload)

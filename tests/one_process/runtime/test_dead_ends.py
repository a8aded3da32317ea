"""Values that a later stage reads without a gradient: detached, compared, or not differentiated."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.chain import plan_of
from support.oracle import train as plain
from support.pipelines import Captured, build, captured_file, profile_of

from autopipe.ir.cuts import Cuts
from autopipe.ir.messages import chains
from autopipe.ir.plan import Plan
from autopipe.trace import capture
from autopipe.workload import LoadOptions, load_workload

pytestmark = pytest.mark.usefixtures("one_thread")
MODELS = Path(__file__).resolve().parents[2] / "shape_models"


def plan_at(subject: Captured, positions: tuple[int, ...], schedule: str = "1f1b") -> Plan:
    plan = plan_of(subject.capture.graph, positions)
    return replace(
        plan,
        workload=subject.profile.workload,
        batch_size=6,
        num_microbatches=3,
        microbatch_size=2,
        schedule=schedule,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("num_cuts", [1, 2])
def test_every_cut_of_a_model_with_dead_ends_trains_like_a_plain_loop(
    schedule: str, num_cuts: int, tmp_path: Path
) -> None:
    subject = captured_file(MODELS / "dead_end.py")
    trains_like_a_plain_loop_at_every_cut(subject, "dead_end", num_cuts, schedule, tmp_path)


def test_a_stage_may_consist_of_a_guard(tmp_path: Path) -> None:
    workload = load_workload(LoadOptions(str(MODELS / "guarded.py")))
    subject = profile_of(workload, capture(workload, allow_data_dependent=True))
    trains_like_a_plain_loop_at_every_cut(subject, "guarded", 2, "1f1b", tmp_path)


def trains_like_a_plain_loop_at_every_cut(
    subject: Captured, name: str, num_cuts: int, schedule: str, folder: Path
) -> None:
    items = list(subject.workload.items(6))
    losses, model, _ = plain(MODELS / f"{name}.py", items, 3)
    legal = Cuts(subject.capture.graph).legal[:: 1 if num_cuts == 1 else 3]
    for number, positions in enumerate(itertools.combinations(legal, num_cuts)):
        pipeline = build(subject, plan_at(subject, positions, schedule), folder / str(number))
        sessions = pipeline.train(items)
        weights = pipeline.weights(sessions)
        assert [sessions[0].executor.stepper.losses[step] for step in range(3)] == losses, positions
        assert all(torch.equal(weights[name], value) for name, value in model.named_parameters()), positions


def test_a_stage_that_only_compares_a_value_is_not_in_its_gradient_chain() -> None:
    subject = captured_file(MODELS / "dead_end.py")
    graph = subject.capture.graph
    names = [node.name for node in graph.nodes]
    cut = plan_at(subject, (names.index("g"), names.index("detach")))
    crossing = {boundary.value: boundary.consumers for boundary in cut.boundaries}
    assert crossing["h"] == (2,) and crossing["g"] == (2,)
    assert chains(graph, cut) == {"b": (0, 1), "k": (1, 2)}


def test_a_call_without_a_gradient_for_its_input_ends_the_chain_with_zeros(tmp_path: Path) -> None:
    subject = captured_file(MODELS / "no_gradient.py")
    names = [node.name for node in subject.capture.graph.nodes]
    plan = plan_at(subject, (names.index("reference"),))
    assert any(boundary.value == "h" and boundary.spec.requires_grad for boundary in plan.boundaries)
    items = list(subject.workload.items(6))
    losses, model, _ = plain(MODELS / "no_gradient.py", items, 3)
    pipeline = build(subject, plan, tmp_path)
    sessions = pipeline.train(items)
    assert [sessions[0].executor.stepper.losses[step] for step in range(len(items))] == losses
    weights = pipeline.weights(sessions)
    assert all(torch.equal(weights[name], value) for name, value in model.named_parameters())

"""A frozen parameter that several stages read: nothing is exchanged, and every schedule supports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracle import train
from support.pipelines import (
    Captured,
    Pipeline,
    assert_equals_oracle,
    build,
    captured_file,
    minibatches,
    plan_for,
    with_exact_ties,
)
from support.schedule_cases import laid_out

from autopipe.ir.plan import Plan
from autopipe.runtime.checkpoint import parts
from autopipe.runtime.checkpoint.checkpoint import Checkpoint

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        {init}

    def forward(self, ids):
        {forward}

def build_model():
    return Net()

def loss(output, target):
    return F.cross_entropy(output, target)

def optimizer(named_parameters):
    return torch.optim.AdamW([p for _, p in named_parameters if p.requires_grad], lr=0.01, weight_decay=0.1)

def data(batch_size=8):
    g = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randint(0, 11, shape, generator=g)
    return [(draw(batch_size, 4), draw(batch_size)) for _ in range(8)]

evaluate_data = data

def example_inputs(batch_size):
    return data(batch_size)[0]
"""
MODELS = {
    "shared embedding": (
        "self.words.weight.requires_grad_(False)",
        """h = self.words(ids).mean(1)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return F.linear(h, self.words.weight)""",
    ),
    "read in the middle too": (
        "self.words.weight.requires_grad_(False)",
        """h = self.words(ids).mean(1)
        for layer in self.layers:
            h = torch.tanh(layer(h)) + F.embedding(ids[:, 0], self.words.weight)
        return F.linear(h, self.words.weight)""",
    ),
    "low rank on tied weights": (
        """self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight
        self.requires_grad_(False)
        self.a = nn.ParameterList(nn.Parameter(0.3 * torch.randn(6, 2)) for _ in range(6))
        self.b = nn.ParameterList(nn.Parameter(0.3 * torch.randn(2, 6)) for _ in range(5))
        self.c = nn.Parameter(0.3 * torch.randn(2, 11))""",
        """h = self.words(ids).mean(1)
        h = h + h @ self.a[0] @ self.b[0]
        for layer, a, b in zip(self.layers, self.a, self.b):
            h = torch.tanh(layer(h) + h @ a @ b)
        return self.head(h) + h @ self.a[5] @ self.c""",
    ),
    "a trained tie beside it": (
        """self.words.weight.requires_grad_(False)
        self.mix = nn.Parameter(0.3 * torch.randn(6, 6))""",
        """h = self.words(ids).mean(1) @ self.mix
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return F.linear(h @ self.mix, self.words.weight)""",
    ),
}
STEPS = 5


def written(name: str, folder: Path) -> Captured:
    init, forward = MODELS[name]
    path = folder / "net.py"
    path.write_text(HEAD.replace("{init}", init).replace("{forward}", forward))
    return captured_file(path)


def frozen_ties(subject: Captured, plan: Plan) -> list[str]:
    specs = subject.capture.graph.parameters
    return [tie.parameter for tie in plan.ties if not specs[tie.parameter].requires_grad]


def trained(pipeline: Pipeline, items: Sequence[Any], **job: Any) -> dict[str, torch.Tensor]:
    assert "words.weight" in frozen_ties(pipeline.captured, pipeline.plan)
    pipeline = replace(pipeline, job=replace(pipeline.job, **job))
    return pipeline.weights(pipeline.train(items))


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "2bw", "pipedream"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_equal_the_plain_loop(name: str, schedule: str, num_stages: int, tmp_path: Path) -> None:
    if name == "a trained tie beside it" and schedule == "pipedream":
        pytest.skip("refused for the trained tie; see test_context")
    subject = written(name, tmp_path)
    plan = plan_for(subject, num_stages, schedule, 4, 8)
    # the trained tie is large; summed once per step it would be equal up to rounding only
    plan = with_exact_ties(plan)
    items = minibatches(subject.workload, STEPS, 8, last=5)
    pipeline = build(subject, plan, tmp_path / "run")
    # the stage files name the written plan, which includes the frozen ties
    assert pipeline.context.plan.digest == plan.digest
    assert_equals_oracle(plan, items, trained(pipeline, items))


@pytest.mark.parametrize("ranks", [((0, 1), (2,)), ((0,), (1, 2))])
def test_replicas_of_each_stage_hold_equal_copies(ranks: tuple[tuple[int, ...], ...], tmp_path: Path) -> None:
    subject = written("shared embedding", tmp_path)
    plan = laid_out(plan_for(subject, 2, "1f1b", 4, 8), "1f1b", ranks)
    items = minibatches(subject.workload, STEPS, 8)
    ours = trained(build(subject, plan, tmp_path / "run"), items)
    _, model, _ = train(tmp_path / "net.py", items, 4)
    for name, parameter in model.named_parameters():
        assert torch.allclose(ours[name], parameter, rtol=1e-4, atol=1e-6), name
    assert torch.equal(ours["words.weight"], model.words.weight)


def test_a_batch_of_another_shape_has_its_own_recording(tmp_path: Path) -> None:
    subject = written("shared embedding", tmp_path)
    plan = plan_for(subject, 2, "2bw", 2, 8)
    items = minibatches(subject.workload, 2, 8)
    items += [(ids[:, :3].contiguous(), target) for ids, target in items]
    assert_equals_oracle(plan, items, trained(build(subject, plan, tmp_path / "run"), items))


def test_a_checkpoint_is_resumed_with_another_number_of_stages(tmp_path: Path) -> None:
    subject = written("low rank on tied weights", tmp_path)
    items = minibatches(subject.workload, STEPS, 8)
    first = build(subject, plan_for(subject, 3, "1f1b", 4, 8), tmp_path / "run", save=True)
    trained(first, items[:3])
    saved = Checkpoint.latest(first.run.checkpoints)
    assert saved is not None and saved.manifest.plan_digest == first.plan.digest
    # a frozen copy is written once, by the stage that owns it
    assert [file.tensors.count("model.words.weight") for file in saved.manifest.files] == [1, 0, 0]
    second = build(subject, plan_for(subject, 2, "1f1b", 4, 8), first.run.path, start_step=3)
    sessions = second.train(items)
    assert_equals_oracle(second.plan, items, second.weights(sessions))


def test_only_trained_ties_are_exchanged_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = written("a trained tie beside it", tmp_path)
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 4, 8), tmp_path / "run", save=True)
    assert {tie.parameter for tie in pipeline.plan.ties} == {"words.weight", "mix"}
    assert {tie.parameter for tie in pipeline.context.message_plan.ties} == {"mix"}
    compared: list[list[set[str]]] = []

    def note(processes: Mapping[tuple[int, int], Mapping[str, int]]) -> None:
        compared.append([set(ties) for ties in processes.values()])

    monkeypatch.setattr(parts, "refuse_unequal_ties", note)
    trained(pipeline, [subject.workload.resized(item, 8) for item in minibatches(subject.workload, 2, 8)])
    assert compared and compared[-1] == [{"mix"}, {"mix"}]

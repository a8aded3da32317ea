"""Frozen parts, adapters, integers and parameter groups train in stages as in a plain loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.oracle import load, train
from support.pipelines import Captured, Pipeline, build, captured_file, minibatches, plan_for

from autopipe.runtime.session import RankSession

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, {inputs}):
        {forward}

def build_model():
    return Net()

def loss(output, target):
    {loss}

def data(batch_size=8):
    g = torch.Generator().manual_seed(3)
    items = []
    for _ in range(8):
        x, y = torch.randn(batch_size, 6, generator=g), torch.randn(batch_size, 6, generator=g)
        ids = torch.randint(0, 9, (batch_size, 4), generator=g)
        mask, target = torch.rand(batch_size, 6, generator=g) > 0.3, torch.randint(0, 5, (batch_size,), generator=g)
        items.append(({item}, target))
    return items

def example_inputs(batch_size):
    return data(batch_size)[0]

def optimizer(named_parameters):
    named = [(n, p) for n, p in named_parameters if p.requires_grad]
    {optimizer}
{more}
"""
CROSS_ENTROPY = "return F.cross_entropy(output, target)"
ADAMW = "return torch.optim.AdamW([p for _, p in named], lr=0.01)"
LAYERS = "self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6)); self.head = nn.Linear(6, 5)"
RUN_LAYERS = """for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)"""
STEP_RATE = """
def scheduler(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=12)
"""
DECAYING_RATE = """
def scheduler(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
"""
GROUPS = """decayed = [p for n, p in named if not n.endswith("bias")]
    others = [p for n, p in named if n.endswith("bias")]
    both = [{"params": decayed, "weight_decay": 0.3, "lr": 0.02}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.SGD([g for g in both if g["params"]], lr=0.05, momentum=0.9)"""
PIECES = {
    "init": LAYERS,
    "inputs": "x",
    "forward": RUN_LAYERS,
    "loss": CROSS_ENTROPY,
    "item": "x",
    "optimizer": ADAMW,
    "more": "",
}
MODELS: dict[str, dict[str, str]] = {
    "plain": {},
    "first layers frozen": {"init": f"{LAYERS}; self.layers[:4].requires_grad_(False)"},
    "middle layers frozen": {"init": f"{LAYERS}; self.layers[1:5].requires_grad_(False)"},
    "last layers frozen": {"init": f"{LAYERS}; self.layers[3:].requires_grad_(False); self.head.requires_grad_(False)"},
    "adapters on a frozen base": {
        "init": f"""{LAYERS}; self.requires_grad_(False)
        self.down = nn.ParameterList(nn.Parameter(0.1 * torch.randn(6, 2)) for _ in range(6))
        self.up = nn.ParameterList(nn.Parameter(torch.zeros(2, 6)) for _ in range(6))""",
        "forward": """for layer, down, up in zip(self.layers, self.down, self.up):
            x = torch.tanh(layer(x) + x @ down @ up)
        return self.head(x)""",
    },
    "integers and booleans between stages": {
        "init": f"{LAYERS}; self.table = nn.Embedding(6, 6)",
        "forward": """x = torch.tanh(self.layers[0](x))
        chosen, positive = x.argmax(-1), x > 0
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        x = torch.where(positive, x, 0.5 * x) + self.table(chosen)
        return self.head(x)""",
    },
    "parameters that nothing uses": {
        "init": f"{LAYERS}; self.spare = nn.Linear(3, 3); self.scale = nn.Parameter(torch.ones(2))",
    },
    "several inputs and outputs": {
        "init": f"{LAYERS}; self.words = nn.Embedding(9, 6)",
        "inputs": "x, ids, mask, y",
        "item": "(x, ids, mask, y)",
        "forward": """h = x * mask + self.words(ids).mean(1)
        for layer in self.layers:
            h = torch.tanh(layer(h)) + 0.1 * x
        return self.head(h), (h - y).pow(2).mean(-1)""",
        "loss": "return F.cross_entropy(output[0], target) + 0.1 * output[1].mean()",
    },
    "a loss with a weight of its own": {
        "inputs": "x, mask",
        "item": "(x, mask)",
        "forward": RUN_LAYERS.replace("return self.head(x)", "return self.head(x), mask[:, 0]"),
        "loss": """logits, counted = output
    weight = counted.sum().float()
    return (F.cross_entropy(logits, target, reduction="none") * counted).sum() / weight.clamp_min(1), weight""",
    },
    "parameter groups": {"optimizer": GROUPS},
    "a learning rate that moves": {"more": STEP_RATE},
    "groups and a learning rate that moves": {
        "optimizer": GROUPS,
        "more": DECAYING_RATE,
    },
}  # fmt: skip


def written(name: str, folder: Path) -> Captured:
    text = HEAD
    for key, piece in {**PIECES, **MODELS[name]}.items():
        text = text.replace("{" + key + "}", piece)
    path = folder / "net.py"
    path.write_text(text)
    return captured_file(path)


def trained(
    subject: Captured, stages: int, schedule: str, folder: Path, **job: float
) -> tuple[Pipeline, list[RankSession]]:
    pipeline = build(subject, plan_for(subject, stages, schedule, 4, 8), folder, **job)
    return pipeline, pipeline.train(minibatches(subject.workload, 6, 8, last=5))


def assert_the_oracles(
    pipeline: Pipeline, sessions: list[RankSession], folder: Path, delta: int = 0, clip: float = 0.0
) -> None:
    items = minibatches(pipeline.captured.workload, 6, 8, last=5)
    losses, model, _ = train(folder / "net.py", items, 4, staleness=lambda name: delta, clip_norm=clip)
    ours = pipeline.weights(sessions)
    assert [sessions[0].executor.stepper.losses[step] for step in range(6)] == losses
    assert losses[0] != losses[-1]
    for name, parameter in model.named_parameters():
        assert torch.equal(ours[name], parameter), name


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_weights_equal_the_plain_loop(name: str, num_stages: int, tmp_path: Path) -> None:
    subject = written(name, tmp_path)
    for schedule, delta in (("1f1b", 0), ("zero-bubble", 0), ("2bw", 1)):
        pipeline, sessions = trained(subject, num_stages, schedule, tmp_path / schedule)
        assert_the_oracles(pipeline, sessions, tmp_path, delta)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_weights_with_clipping_equal_the_plain_loop(name: str, num_stages: int, tmp_path: Path) -> None:
    subject = written(name, tmp_path)
    pipeline, sessions = trained(subject, num_stages, "1f1b", tmp_path / "run", clip_grad_norm=0.05)
    assert_the_oracles(pipeline, sessions, tmp_path, clip=0.05)


@pytest.mark.parametrize("name", ["first layers frozen", "adapters on a frozen base", "parameters that nothing uses"])
def test_recompute_does_not_change_the_weights(name: str, tmp_path: Path) -> None:
    subject = written(name, tmp_path)
    plan = plan_for(subject, 3, "1f1b", 4, 8)
    plan = replace(plan, stages=tuple(replace(stage, recompute="stage") for stage in plan.stages))
    pipeline = build(subject, plan, tmp_path / "run")
    sessions = pipeline.train(minibatches(subject.workload, 6, 8, last=5))
    assert_the_oracles(pipeline, sessions, tmp_path)


def test_a_frozen_stage_has_no_optimizer_and_receives_no_gradient(tmp_path: Path) -> None:
    pipeline, sessions = trained(written("first layers frozen", tmp_path), 3, "1f1b", tmp_path / "run")
    assert sessions[0].executor.stepper.optimizers == {0: None}
    assert all(to != 0 for _, to in pipeline.context.message_plan.backward)


def test_integers_and_booleans_cross_stages_without_a_gradient(tmp_path: Path) -> None:
    pipeline, _ = trained(written("integers and booleans between stages", tmp_path), 3, "1f1b", tmp_path / "run")
    kinds = {boundary.value: boundary.spec.dtype for boundary in pipeline.plan.boundaries}
    assert {"int64", "bool"} <= set(kinds.values())
    back = {value for values in pipeline.context.message_plan.backward.values() for value in values}
    assert back == {value for value, dtype in kinds.items() if dtype == "float32"}


@pytest.mark.parametrize("name", ["parameter groups", "groups and a learning rate that moves"])
def test_every_parameter_keeps_the_settings_of_its_group(name: str, tmp_path: Path) -> None:
    _, sessions = trained(written(name, tmp_path), 3, "1f1b", tmp_path / "run")
    module = load(tmp_path / "net.py")
    model = module.build_model()
    optimizer = module.optimizer(list(model.named_parameters()))
    if hasattr(module, "scheduler"):
        scheduler = module.scheduler(optimizer)
        for _ in range(6):
            optimizer.step()
            scheduler.step()
    expected = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    numbers = {
        name: group
        for session in sessions
        for stage, optimizer in session.executor.stepper.optimizers.items()
        for name, parameter in session.executor.stepper.owned(stage).items()
        for group in optimizer.param_groups
        if any(parameter is member for member in group["params"])
    }
    assert numbers.keys() == dict(model.named_parameters()).keys()
    for parameter, value in model.named_parameters():
        for number in ("lr", "weight_decay"):
            assert numbers[parameter][number] == expected[id(value)][number], parameter

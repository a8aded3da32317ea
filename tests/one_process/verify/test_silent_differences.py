"""Random runs (model, batch, schedule, replicas, recompute, clipping, ragged batch, resume) are equal or refused.

Each run writes a model file, trains it in stages with ranks as threads, and compares every weight and buffer with the
independent oracle. The only other accepted outcome is an AutopipeError.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support import oracle
from support.models.surveyed import surveyed
from support.pipelines import Captured, build, captured_file, minibatches, plan_for
from support.schedule_cases import laid_out

from autopipe.errors import AutopipeError
from autopipe.ir.plan import Plan

DRAWS, QUICK_DRAWS = 200, 12
STEPS, BATCH = 5, 8

BODIES = {
    "residual": (
        "self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5)); self.head = nn.Linear(6, 5)",
        "for layer in self.layers: x = x + torch.tanh(layer(x))\n        return self.head(x)",
    ),
    "dropout": (
        "self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5)); self.head = nn.Linear(6, 5)",
        "for layer in self.layers: x = F.dropout(layer(x), 0.2, self.training)\n        return self.head(x)",
    ),
    "batch norm": (
        "self.layers = nn.Sequential(*(part for _ in range(3) for part in"
        " (nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU()))); self.head = nn.Linear(6, 5)",
        "return self.head(self.layers(x))",
    ),
    "part in eval mode": (
        "self.base = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 6));"
        " self.top = nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)); self.head = nn.Linear(6, 5);"
        " self.base.requires_grad_(False).eval()",
        "return self.head(torch.tanh(self.top(self.base(x))))",
    ),
    "spectral norm": (
        "self.layers = nn.ModuleList(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)) for _ in range(3));"
        " self.head = nn.Linear(6, 5)",
        "for layer in self.layers: x = torch.tanh(layer(x))\n        return self.head(x)",
    ),
    "state in a buffer": (
        "self.register_buffer('queue', torch.zeros(6)); self.register_buffer('count', torch.tensor(0));"
        " self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)); self.head = nn.Linear(6, 5)",
        "for layer in self.layers: x = torch.tanh(layer(x))\n        self.count += 1\n"
        "        self.queue.mul_(0.9).add_(x.detach().mean(0))\n        return self.head(x + self.queue / self.count)",
    ),
    "shared layer": (
        "self.first = nn.Linear(6, 6); self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3));"
        " self.head = nn.Linear(6, 5)",
        "x = torch.tanh(self.first(x))\n        for layer in self.layers: x = torch.tanh(layer(x))\n"
        "        return self.head(self.first(x))",
    ),
    "frozen shared layer": (
        "self.first = nn.Linear(6, 6).requires_grad_(False); self.head = nn.Linear(6, 5);"
        " self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))",
        "x = torch.tanh(self.first(x))\n        for layer in self.layers: x = torch.tanh(layer(x))\n"
        "        return self.head(self.first(x))",
    ),
    "reads the layout": (
        "self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)); self.head = nn.Linear(6, 5)",
        "if not x.is_contiguous(): x = x * 0.5\n        for layer in self.layers: x = torch.tanh(layer(x))\n"
        "        return self.head(x)",
    ),
    "counts its calls": (
        "self.calls = 0; self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)); self.head = nn.Linear(6, 5)",
        "self.calls += 1\n        if self.calls > 9: x = x * 0.5\n"
        "        for layer in self.layers: x = torch.tanh(layer(x))\n        return self.head(x)",
    ),
}
# (arguments of forward, lines before the body, the loss of (output, target), inputs and target of minibatch ``i``)
BATCHES = {
    "tensors": ("x", "", "F.cross_entropy(output, target)", "x", "y"),
    "ignored targets": (
        "x",
        "",
        "F.cross_entropy(output, target, ignore_index=0)",
        "x",
        "torch.where(torch.arange(n) < 5, y, torch.zeros_like(y))",
    ),
    "mask in the target": (
        "x",
        "",
        "(F.cross_entropy(output, target[0], reduction='none') * target[1]).sum() / target[1].sum()",
        "x",
        "(y, (torch.arange(n) % 3 > 0).float())",
    ),
    "a number that changes": ("x, scale", "x = x * scale", "F.cross_entropy(output, target)", "(x, 0.5 + i // 2)", "y"),
    "a word that changes": (
        "x, task",
        "x = -x if task == 'b' else x",
        "F.cross_entropy(output, target)",
        "(x, 'ab'[i % 2])",
        "y",
    ),
    "an input that comes later": (
        "x, more",
        "x = x if more is None else x + more",
        "F.cross_entropy(output, target)",
        "(x, x.flip(0) if i > 1 else None)",
        "y",
    ),
    "a weight in the target": (
        "x",
        "",
        "F.cross_entropy(output, target['y']) * target['w']",
        "x",
        "{'y': y, 'w': 1.0 if i < 3 else 0.1}",
    ),
    "transposed inputs": (
        "x",
        "",
        "F.cross_entropy(output, target)",
        "x if i % 2 else x.t().contiguous().t()",
        "y",
    ),
}
OPTIMIZERS = {
    "adamw": ("return torch.optim.AdamW(trained, lr=0.01)", ""),
    "sgd": ("return torch.optim.SGD(trained, lr=0.05, momentum=0.9)", ""),
    "adamw with OneCycleLR": (
        "return torch.optim.AdamW(trained, lr=0.01)",
        "def scheduler(optimizer): return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)",
    ),
    "sgd with SequentialLR": (
        "return torch.optim.SGD(trained, lr=0.05, momentum=0.9)",
        "def scheduler(optimizer):\n    rates = torch.optim.lr_scheduler\n    return rates.SequentialLR(optimizer,"
        " [rates.LinearLR(optimizer, 0.2, 1.0, 2), rates.ExponentialLR(optimizer, 0.8)], [2])",
    ),
}
FILE = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {init}
        self.to(torch.{dtype})

    def body(self, x):
        {body}

    def forward(self, {arguments}):
        {before}
        return self.body(x)

def build_model():
    return Net()

def loss(output, target):
    return {loss}

def data(batch_size={batch}):
    g = torch.Generator().manual_seed(3)
    n = batch_size
    for i in range(8):
        x = torch.randn(n, 6, generator=g, dtype=torch.float64).to(torch.{dtype})
        y = torch.randint(1, 5, (n,), generator=g)
        yield {inputs}, {target}

def optimizer(named_parameters):
    trained = [p for _, p in named_parameters if p.requires_grad]
    {optimizer}
{more}
"""
WITH_REPLICAS = ("gpipe", "1f1b", "eager-1f1b", "2bw", "pipedream")
SCHEDULES = (*WITH_REPLICAS, "zero-bubble", "interleaved")


@dataclass(frozen=True)
class Draw:
    """One random run. ``replicas[s]``: ranks of stage s. ``resume``: the step at which another plan resumes, or 0."""

    body: str
    batch: str
    optimizer: str
    schedule: str
    replicas: tuple[int, ...]
    microbatches: int
    recompute: str
    clip: float
    last: int
    resume: int

    @staticmethod
    def of(seed: int) -> Draw:
        choose = random.Random(seed)
        replicas = choose.choice([(1,), (1, 1), (1, 1, 1), (1, 1), (1, 1, 1), (2, 1), (1, 2), (2,)])
        return Draw(
            choose.choice(list(BODIES)),
            choose.choice(list(BATCHES)),
            choose.choice(list(OPTIMIZERS)),
            choose.choice(SCHEDULES if max(replicas) == 1 else WITH_REPLICAS),
            replicas,
            choose.choice([1, 2, 3, 4]),
            choose.choice(["never", "never", "block", "stage"]),
            choose.choice([0.0, 0.0, 0.2]),
            choose.choice([0, 5, 7]),
            choose.choice([0, 0, 1, 2, 3]),
        )

    @property
    def reordered(self) -> bool:
        """Whether the order of sums differs from one process; the model then computes in float64."""
        return max(self.replicas) > 1 or bool(self.clip) or self.body == "shared layer"

    def text(self) -> str:
        """Return the model file."""
        init, body = BODIES[self.body]
        arguments, before, loss, inputs, target = BATCHES[self.batch]
        optimizer, more = OPTIMIZERS[self.optimizer]
        dtype = "float64" if self.reordered else "float32"
        pieces = {"init": init, "body": body, "arguments": arguments, "before": before or "pass", "loss": loss}
        pieces |= {"inputs": inputs, "target": target, "optimizer": optimizer, "more": more}
        return FILE.format(**pieces, dtype=dtype, batch=BATCH)

    def plan(self, captured: Captured, replicas: tuple[int, ...]) -> Plan:
        """Return a straight plan's cuts on these ranks, under the schedule of the draw."""
        straight = plan_for(captured, len(replicas), "gpipe", self.microbatches, BATCH)
        ends = [sum(replicas[: stage + 1]) for stage in range(len(replicas))]
        ranks = tuple(tuple(range(end - count, end)) for end, count in zip(ends, replicas, strict=True))
        return laid_out(straight, self.schedule, ranks, (self.recompute,), graph=captured.capture.graph)

    def staleness(self) -> list[int]:
        """Return the staleness by stage, from docs/semantics.md: ceil(warm-up / m) for pipedream, 1 for 2bw."""
        if self.schedule not in ("2bw", "pipedream"):
            return [0] * len(self.replicas)
        if self.schedule == "2bw":
            return [1] * len(self.replicas)
        later = [sum(self.replicas[stage + 1 :]) for stage in range(len(self.replicas))]
        warmups = [-(-ahead // count) * count for ahead, count in zip(later, self.replicas, strict=True)]
        return [-(-warmup // self.microbatches) for warmup in warmups]

    def divisor(self, part: tuple[object, torch.Tensor]) -> float:
        """Return the divisor of the loss of a microbatch."""
        target = part[1]
        if self.batch == "ignored targets":
            return int((target != 0).sum())
        if self.batch == "mask in the target":
            return float(target[1].sum())
        return oracle.samples(target)


def trained(draw: Draw, folder: Path) -> tuple[Captured, Plan, dict[str, torch.Tensor]]:
    """Train in stages, with a resume under another plan if drawn, and return the weights and buffers."""
    path = folder / "net.py"
    path.write_text(draw.text())
    captured = captured_file(path)
    plan = draw.plan(captured, draw.replicas)
    items = minibatches(captured.workload, STEPS, BATCH, last=draw.last)
    options = {"clip_grad_norm": draw.clip}
    run = folder / "run"
    if draw.resume:
        build(captured, plan, run, save=True, **options).train(items[: draw.resume])
        if draw.schedule not in ("2bw", "pipedream"):
            plan = draw.plan(captured, (1, 1) if draw.replicas != (1, 1) else (1, 1, 1))
        options |= {"start_step": draw.resume}
    pipeline = build(captured, plan, run, **options)
    return captured, plan, pipeline.weights(pipeline.train(items))


def outcome(seed: int, folder: Path) -> str:
    """Return "equal", "refused" or "varies". Raises: AssertionError if the weights differ from the oracle's."""
    draw = Draw.of(seed)
    if draw.body == "counts its calls":  # the process that reads would tell the stages, and none does here
        (folder / "net.py").write_text(draw.text())
        assert surveyed(folder / "net.py").first is not None
        return "varies"
    try:
        captured, plan, weights = trained(draw, folder)
    except AutopipeError:
        return "refused"
    items = minibatches(captured.workload, STEPS, BATCH, last=draw.last)
    deltas = draw.staleness()
    late = oracle.by_owner([stage.parameters for stage in plan.stages], deltas) if any(deltas) else lambda name: 0
    _, model, _ = oracle.train(
        folder / "net.py",
        items,
        draw.microbatches,
        staleness=late,
        clip_norm=draw.clip,
        divisor=draw.divisor,
    )
    averaged = max(draw.replicas) > 1  # each replica has its own statistics, whose mean is stored
    for name, tensor in model.state_dict().items():
        if name not in weights or (averaged and name in dict(model.named_buffers())):
            continue
        if draw.reordered:
            assert torch.allclose(weights[name], tensor, rtol=1e-9, atol=1e-12), (seed, draw, name)
        else:
            assert torch.equal(weights[name], tensor), (seed, draw, name)
    return "equal"


@pytest.mark.parametrize("seed", range(QUICK_DRAWS))
def test_a_random_run_equals_plain_training_or_is_refused(seed: int, tmp_path: Path) -> None:
    assert outcome(seed, tmp_path) in ("equal", "refused", "varies")


@pytest.mark.slow
def test_many_random_runs_equal_plain_training_or_are_refused(tmp_path: Path) -> None:
    outcomes = []
    for seed in range(QUICK_DRAWS, DRAWS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcomes.append(outcome(seed, folder))
    # a sweep with nearly all runs refused would prove nothing
    assert outcomes.count("equal") > len(outcomes) // 2

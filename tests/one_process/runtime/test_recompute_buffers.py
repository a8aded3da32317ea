"""A recomputed forward reads buffers with the values that they had in the first forward of the microbatch."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.oracle import train
from support.pipelines import Captured, build, captured_file, minibatches, plan_for, staleness_of
from support.schedule_cases import laid_out

from autopipe.ir.graph import Node
from autopipe.ir.plan import Plan, Stage
from autopipe.planning.cost.peaks import with_peaks

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        {init}

    def forward(self, x):
        {forward}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)

def build_model():
    return Net()

def loss(output, target):
    return F.cross_entropy(output, target)

def optimizer(named_parameters):
    return torch.optim.AdamW([p for _, p in named_parameters], lr=0.02)

def data(batch_size=8):
    g = torch.Generator().manual_seed(3)
    x = lambda: torch.randn(batch_size, 6, generator=g)
    return [(x(), torch.randint(0, 5, (batch_size,), generator=g)) for _ in range(8)]

def example_inputs(batch_size):
    return data(batch_size)[0]
"""
RUN = "return self.linear(x)"
MODELS = {
    "spectral norm": ("self.linear = nn.utils.parametrizations.spectral_norm(self.linear)", RUN),
    "old spectral norm": ("self.linear = nn.utils.spectral_norm(self.linear)", RUN),
    "memory queue": (
        """self.register_buffer("queue", torch.randn(8, 6))
        self.register_buffer("at", torch.zeros(1, dtype=torch.int64))""",
        """x = self.linear(x)
        key = x.detach().mean(0, keepdim=True)
        similar = x @ self.queue.clone().t()
        with torch.no_grad():
            self.queue.index_copy_(0, self.at, key)
            self.at.add_(1).remainder_(8)
        return x + 0.1 * similar[:, :6]""",
    ),
    "rolled queue": (
        """self.register_buffer("queue", torch.randn(8, 6))""",
        """x = self.linear(x)
        similar = x @ self.queue.clone().t()
        with torch.no_grad():
            self.queue.copy_(torch.cat([x.detach().mean(0, keepdim=True), self.queue[:-1]]))
        return x + 0.1 * similar[:, :6]""",
    ),
    "cumulative integers": (
        """self.register_buffer("seen", torch.zeros((), dtype=torch.int64))""",
        """self.seen.add_(1)
        return self.linear(x) / self.seen.float().sqrt()""",
    ),
    "running scale": (
        """self.register_buffer("scale", torch.ones(6), persistent=False)""",
        """with torch.no_grad():
            self.scale.mul_(0.9).add_(0.1 * x.detach().abs().mean(0))
        return self.linear(x / self.scale.clone())""",
    ),
    "under two names": (
        """self.register_buffer("first", torch.ones(6))
        self.inner = nn.Module()
        self.inner.register_buffer("second", self.first)""",
        """self.inner.second.mul_(1.1)
        return self.linear(x * self.first.clone())""",
    ),
    "batch norm": ("self.norm = nn.BatchNorm1d(6)", "return self.norm(self.linear(x))"),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "2bw", "pipedream")
STEPS = 4
WHOLE = ("spectral norm", "old spectral norm", "memory queue", "cumulative integers")
CASES = [(name, m) for name in MODELS for m in ((1, 2, 4) if name in WHOLE else (4,))]


@functools.cache
def written(name: str) -> Captured:
    init, forward = MODELS[name]
    path = Path(tempfile.mkdtemp(prefix="autopipe-test-")) / "net.py"
    path.write_text(HEAD.replace("{init}", init).replace("{forward}", forward))
    return captured_file(path)


def recomputed(subject: Captured, schedule: str, num_microbatches: int, mode: str = "stage") -> Plan:
    """Return two stages, or two on each of two ranks, that all recompute."""
    plan = plan_for(subject, 4 if schedule == "interleaved" else 2, "gpipe", num_microbatches, 8)
    ranks = ((0,), (1,), (0,), (1,))[: len(plan.stages)]
    return laid_out(plan, schedule, ranks, recompute=(mode,), graph=subject.capture.graph)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("name", "num_microbatches"), CASES)
def test_weights_equal_the_plain_loop(name: str, num_microbatches: int, schedule: str, tmp_path: Path) -> None:
    # half of the cases each, for the time that they take
    mode = ("stage", "block")[(CASES.index((name, num_microbatches)) + SCHEDULES.index(schedule)) % 2]
    if schedule == "interleaved" and num_microbatches == 1:
        pytest.skip("interleaved takes a multiple of the ranks")
    subject = written(name)
    plan = recomputed(subject, schedule, num_microbatches, mode)
    # batch statistics need more than one sample
    items = minibatches(subject.workload, STEPS, 8, last=8 if name == "batch norm" else 5)
    pipeline = build(subject, plan, tmp_path)
    ours = pipeline.weights(pipeline.train(items))
    path = Path(subject.workload.spec.target)
    _, model, _ = train(path, items, num_microbatches, staleness=staleness_of(plan))
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    assert ours.keys() == state.keys()
    for key, tensor in state.items():
        assert torch.equal(ours[key], tensor), key


def test_the_copies_of_buffers_are_part_of_the_peak() -> None:
    subject = written("memory queue")
    plan = recomputed(subject, "gpipe", 4)
    assert subject.capture.graph.replayed_buffers == subject.capture.graph.buffers.keys()
    without = replace(
        subject.profile, graph=replace(subject.capture.graph, nodes=tuple(map(unwritten, subject.capture.graph.nodes)))
    )
    ours, others = with_peaks(plan, subject.profile), with_peaks(plan, without)
    # the queue (8 rows of 6 numbers) and its position, of two blocks, for each microbatch in flight: 4 before the first
    # backward, 3 once its gradients exist
    kept = 2 * (8 * 6 * 4 + 8)
    for larger, smaller in zip(ours.stages, others.stages, strict=True):
        assert 3 * kept <= larger.peak_bytes - smaller.peak_bytes <= 4 * kept
    assert with_peaks(replace(plan, stages=stored(plan)), subject.profile) == with_peaks(
        replace(plan, stages=stored(plan)), without
    )


def unwritten(node: Node) -> Node:
    return replace(node, buffers_written=())


def stored(plan: Plan) -> tuple[Stage, ...]:
    return tuple(replace(stage, recompute="never") for stage in plan.stages)


def test_running_statistics_are_not_copied() -> None:
    assert not written("batch norm").capture.graph.replayed_buffers
    assert len(written("spectral norm").capture.graph.replayed_buffers) == 8

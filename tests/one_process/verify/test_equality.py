"""Training in stages equals plain training bit for bit, compared with an oracle that shares no code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.oracle import train as plain
from support.pipelines import ARGUMENTS, BATCH, build, captured, captured_file, minibatches, plan_for
from support.samples import SAMPLES

from autopipe.ir.cuts import Cuts
from autopipe.schedules import REGISTRY
from autopipe.verify.check import compare

SYNCHRONOUS = [name for name in ("gpipe", "1f1b") if name in REGISTRY]


def arguments(sample: str) -> dict[str, float]:
    return {name: float(text) if "." in text else int(text) for name, text in ARGUMENTS[sample].items()}


@pytest.mark.parametrize("sample", sorted(BATCH))
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_a_check_finds_every_sample_equal(sample: str, schedule: str, num_stages: int, tmp_path: Path) -> None:
    subject = captured(sample)
    plan = plan_for(subject, num_stages, schedule, 4, BATCH[sample])
    pipeline = build(subject, plan, tmp_path, steps=3)
    items = minibatches(subject.workload, 3, BATCH[sample], last=BATCH[sample] - 1)
    draws = any(node.num_random for node in subject.capture.graph.nodes)
    comparison = compare(subject.workload, pipeline.run, pipeline.job, pipeline.context, items, draws=draws)
    assert comparison.equal, [d for d in comparison.differences if not d.bitwise]
    assert comparison.bitwise or not comparison.promised


@pytest.mark.parametrize("sample", sorted(BATCH))
def test_weights_after_five_steps_equal_a_plain_loop(sample: str, tmp_path: Path) -> None:
    subject = captured(sample)
    pipeline = build(subject, plan_for(subject, 3, "1f1b", 4, BATCH[sample]), tmp_path)
    items = minibatches(subject.workload, 5, BATCH[sample], last=3)
    sessions = pipeline.train(items)
    losses, model, _ = plain(SAMPLES / f"{sample}.py", items, 4, arguments=arguments(sample))
    ours = pipeline.weights(sessions)
    stepper = sessions[0].executor.stepper
    assert [stepper.losses[step] for step in range(5)] == losses
    for name, parameter in model.named_parameters():
        assert torch.equal(ours[name], parameter), name
    for name, buffer in model.named_buffers():
        assert torch.equal(ours.get(name, buffer), buffer), name


@pytest.mark.parametrize("sample", ["gpt", "unet", "seq2seq_lstm"])
def test_gradients_do_not_depend_on_stages_or_microbatches(sample: str, tmp_path: Path) -> None:
    subject = captured(sample)
    items = minibatches(subject.workload, 1, 7)
    for num_microbatches in (1, 3, 8):
        _, _, (expected,) = plain(SAMPLES / f"{sample}.py", items, num_microbatches, arguments=arguments(sample))
        for num_stages in (1, 2, 3, 4):
            weights: dict[str, torch.Tensor] = {}

            def keep(stage: int, step: int, parameters: dict[str, torch.nn.Parameter], gradients=weights) -> None:
                gradients.update({n: p.grad.clone() for n, p in parameters.items() if p.grad is not None})

            plan = plan_for(subject, num_stages, "1f1b", num_microbatches, 8)
            build(subject, plan, tmp_path / f"{num_microbatches}-{num_stages}").train(
                items, on_gradients=lambda process, hook=keep: hook
            )
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[name], expected[name]) for name in expected), (num_microbatches, num_stages)


LAYOUTS = """
    def __init__(self):
        super().__init__()
        self.a, self.gamma = nn.Conv2d(3, 24, 3, padding=1), nn.Parameter(torch.rand(24, 1, 1))
        self.b, self.beta = nn.Linear(24, 19), nn.Parameter(torch.rand(19))
        self.c = nn.Linear(19 * 64, 5)
    def forward(self, x):
        y = self.b((self.a(x) * self.gamma).permute(0, 2, 3, 1).tanh()) * self.beta
        return self.c(y.permute(0, 3, 1, 2).sigmoid().flatten(1))
"""

SLICES = """
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3 * 64, 48), nn.Linear(48, 5)
    def forward(self, x):
        h = self.a(x.flatten(1))
        left, column = h[:, :13] * 1, h[:, 7]
        part = h[:, 3:20]
        return self.b(h.tanh()) * part.sum() + column.sum() + left.mean() + part.mean(0).pow(2).sum()
"""

MODEL_FILE = """
import torch
from torch import nn

class Net(nn.Module):{body}
def build_model():
    return Net()

loss = nn.CrossEntropyLoss()

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield torch.randn(batch_size, 3, 8, 8, generator=g), torch.randint(0, 5, (batch_size,), generator=g)
"""


@pytest.mark.parametrize("body", [LAYOUTS, SLICES], ids=["layouts", "slices"])
def test_values_and_gradients_keep_their_strides_across_every_cut(tmp_path: Path, body: str) -> None:
    # the grad of a leaf has the strides of the leaf, but plain autograd passes a gradient on with its own strides, on
    # which the rounding of sums depends
    path = tmp_path / "layouts.py"
    path.write_text(MODEL_FILE.format(body=body))
    subject = captured_file(path)
    items = minibatches(subject.workload, 2, 8)
    for num_stages in range(2, len(Cuts(subject.capture.graph).legal) + 2):
        plan = plan_for(subject, num_stages, "1f1b", 2, 8)
        pipeline = build(subject, plan, tmp_path / str(num_stages), steps=2)
        comparison = compare(subject.workload, pipeline.run, pipeline.job, pipeline.context, items, draws=False)
        assert comparison.bitwise, (num_stages, comparison.max_relative_error)

"""``check`` of teams: equal within the rounding of sums in parts, and no difference hides behind an optimizer."""

import dataclasses
import functools

import pytest
import torch
from support.pipelines import build, captured_file, minibatches, plan_for, profile_of

from autopipe import team
from autopipe.ir.teams.axis_sets import choose
from autopipe.trace.axes import find_axes
from autopipe.trace.teams import of_team
from autopipe.verify.check import compare
from autopipe.verify.split_sums import SplitSums

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(4))
        self.wide, self.narrow, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.2)

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, t, 3, 4, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q * self.scale, k, v, dropout_p=0.2)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, 16))
        return x + self.narrow(self.drop(F.gelu(self.wide(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding({words}, 16), nn.Linear(16, {words})
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model():
    return Model()


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def data(batch_size=6):
    generator = torch.Generator().manual_seed(3)
    while True:
        x = torch.randint(0, {words}, (batch_size, 8), generator=generator)
        x[0, 0] = {words} - 1
        yield x, x.roll(1, 1)


class Drifting(torch.optim.SGD):
    def step(self):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data += 0.05


def optimizer(named):
    return {optimizer}
"""
# moves parameters whose gradient is zero, as the padding's
DRIFT = "Drifting([p for _, p in named], lr=1e-2)"
ADAM, SGD = "torch.optim.AdamW([p for _, p in named], lr=1e-2)", "torch.optim.SGD([p for _, p in named], lr=1e-2)"


@functools.cache
def subject_of(folder, optimizer, size, words):
    path = folder / f"{size}-{len(optimizer)}-{words}.py"
    path.write_text(MODEL.replace("{optimizer}", optimizer).replace("{words}", str(words)))
    whole = captured_file(path)
    axes = choose(whole.capture.graph, find_axes(whole.capture).axes, size)
    subject = profile_of(whole.workload, of_team(whole.capture, axes, size))
    assert {"blocks.0.scale", "blocks.1.scale"} <= set(subject.capture.partial)
    assert {"table.weight", "head.weight", "head.bias"} <= set(subject.capture.shards)
    return subject


def checked(folder, optimizer, size=2, ranks=1, words=24, **job):
    subject = subject_of(folder, optimizer, size, words)
    plan = dataclasses.replace(plan_for(subject, ranks, "1f1b", 2, 6), team=size)
    pipeline = build(subject, plan, folder / f"{size}-{ranks}-{len(optimizer)}", **job)
    items = minibatches(subject.workload, 3, 6, last=5)
    return compare(subject.workload, pipeline.run, pipeline.job, pipeline.context, items, draws=True)


@pytest.mark.parametrize("optimizer", [ADAM, SGD])
@pytest.mark.parametrize(("size", "ranks", "clip"), [(2, 1, 0.0), (2, 2, 0.0), (4, 1, 0.0), (2, 2, 0.1)])
def test_teams_are_equal_within_the_rounding_of_their_sums(optimizer, size, ranks, clip, tmp_path_factory):
    result = checked(tmp_path_factory.mktemp("run"), optimizer, size, ranks, clip_grad_norm=clip)
    worst = max(result.differences, key=lambda d: d.error - d.noise)
    assert result.equal, worst
    assert not result.promised
    assert any("tensor parallelism" in reason for reason in result.reasons)
    assert 0 < result.noise < 1e-5
    # the noise is that of such sums: real differences are of its size, and neither far below nor above
    typical = sorted(d.gradient for d in result.differences)[len(result.differences) // 2]
    assert result.gradient_noise / 20 < typical < 20 * result.gradient_noise


@pytest.mark.parametrize("optimizer", [ADAM, SGD, DRIFT])
@pytest.mark.parametrize(("size", "ranks", "clip"), [(2, 2, 0.1), (4, 1, 0.0)])
def test_a_vocabulary_that_the_team_does_not_divide(optimizer, size, ranks, clip, tmp_path_factory):
    result = checked(tmp_path_factory.mktemp("run"), optimizer, size, ranks, words=25, clip_grad_norm=clip)
    worst = max(result.differences, key=lambda d: d.error - d.noise)
    assert result.equal, worst
    assert 0 < result.noise < 1e-5
    assert {"table.weight", "head.weight", "head.bias"} <= {d.name for d in result.differences}


def with_padding(stage, logits, dim, size):
    """The loss reads padding."""
    return logits


def one_less(stage, count, size, right=team._range):
    """No member has the last word."""
    return right(stage, count, size and size - 1)


def one_late(stage, count, size, right=team._range):
    """Every member but the first has the word after its own."""
    first, own = right(stage, count, size)
    return first + (stage._autopipe_team.member > 0), own


@pytest.mark.parametrize("optimizer", [ADAM, SGD])
@pytest.mark.parametrize(("name", "broken"), [("_classes", with_padding), ("_range", one_less), ("_range", one_late)])
def test_wrong_padding_is_a_difference(name, broken, optimizer, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(team, name, broken)
    assert not checked(tmp_path_factory.mktemp("run"), optimizer, words=25).equal


def broken_entered(stage, value):
    return value.view_as(value)


def broken_dropped(stage, value, rate, along):
    """Every member has the mask of the first."""
    first = team.Unplaced(type("First", (), {"member": 0, "size": stage._autopipe_team.size})())
    return value * team._mask(first, value, rate, along) if rate else value


def broken_looked_up(stage, ids, weight, padding_idx=None):
    """The rows of other members are not zero."""
    local, _ = team._own(stage, ids, weight.shape[0])
    return team.summed(stage, torch.nn.functional.embedding(local, weight))


@pytest.mark.parametrize("optimizer", [ADAM, SGD])
@pytest.mark.parametrize(
    ("name", "broken"),
    [("entered", broken_entered), ("dropped", broken_dropped), ("looked_up", broken_looked_up)],
)
def test_a_wrong_exchange_is_a_difference(name, broken, optimizer, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(team, name, broken)
    assert not checked(tmp_path_factory.mktemp("run"), optimizer).equal


@pytest.mark.parametrize("optimizer", [ADAM, SGD])
def test_a_partial_gradient_that_is_not_summed_is_a_difference(optimizer, tmp_path_factory, monkeypatch):
    from autopipe.runtime.step.stepper import Stepper

    complete = Stepper._complete

    def without_sum(self, stage, minibatch):
        self.partial = {}
        complete(self, stage, minibatch)

    monkeypatch.setattr(Stepper, "_complete", without_sum)
    result = checked(tmp_path_factory.mktemp("run"), optimizer)
    assert not result.equal
    assert {d.name for d in result.differences if d.gradient > 1e-3} >= {"blocks.0.scale", "blocks.1.scale"}


def test_products_in_parts_are_those_of_the_whole():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 5, 7), torch.randn(6, 7, requires_grad=True), torch.randn(6)
    expected = torch.nn.functional.linear(x, weight, bias)
    with SplitSums(3) as mode:
        split = torch.nn.functional.linear(x, weight, bias)
        added = torch.addmm(bias, x[0], weight.t())
        product = x @ weight.t()
        small = x[..., :2] @ torch.ones(2, 2)
    assert mode.num_split == 3
    assert not torch.equal(split, expected)
    assert torch.allclose(split, expected, atol=1e-6)
    assert torch.allclose(added, expected[0], atol=1e-6)
    assert torch.allclose(product + bias, expected, atol=1e-6)
    assert torch.equal(small, x[..., :2] @ torch.ones(2, 2))
    (ours,) = torch.autograd.grad(split.square().sum(), weight)
    (theirs,) = torch.autograd.grad(expected.square().sum(), weight)
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", [True, False])
def test_the_products_of_torchs_attention_are_split(weights):
    torch.manual_seed(0)
    module, x = torch.nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True), torch.randn(3, 5, 8)
    torch.manual_seed(1)
    expected, attention = module(x, x, x, need_weights=weights)
    torch.manual_seed(1)
    with SplitSums(2) as mode:
        split, same = module(x, x, x, need_weights=weights)
    assert mode.num_split == (2 if weights else 3)  # two projections, and the attention of the fused kernel
    assert not torch.equal(split, expected)
    assert torch.allclose(split, expected, atol=1e-6)
    assert attention is same is None or torch.allclose(attention, same, atol=1e-6)

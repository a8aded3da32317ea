"""Teams that do not divide the vocabulary: what pads it stays zero, and no checkpoint has it."""

import dataclasses
from pathlib import Path

import pytest
import torch
from support import oracle
from support.pipelines import build, captured_file, minibatches, plan_for, profile_of

from autopipe.commands.training.checkpoints import refuse_other_parameters
from autopipe.errors import RunError
from autopipe.ir.teams.axis_sets import choose
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.directory import directory_of
from autopipe.trace.axes import find_axes
from autopipe.trace.axes.sums_over_members import joined
from autopipe.trace.teams import of_team

WORDS, BATCH = 41, 4
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.wide, self.narrow = nn.Embedding(41, 12, padding_idx=3), nn.Linear(12, 24), nn.Linear(24, 12)
        self.head = nn.Linear(12, 41)
        self.head.weight = self.table.weight
        self.register_buffer("penalty", torch.linspace(0.0, 1.0, 41))
        self.second = nn.Parameter(torch.randn(12, 41))

    def forward(self, x):
        y = self.table(x)
        y = y + self.narrow(torch.tanh(self.wide(y)))
        return F.log_softmax(self.head(y) + y @ self.second - self.penalty, -1)


def build_model():
    torch.manual_seed(1)
    return Net()


def loss(output, target):
    return F.nll_loss(output.flatten(0, 1), target.flatten())


def optimizer(named):
    return torch.optim.AdamW([p for _, p in named], lr=1e-2, weight_decay=0.1)


def data(batch_size=4):
    generator = torch.Generator().manual_seed(3)
    while True:
        x = torch.randint(0, 41, (batch_size, 8), generator=generator)
        x[0, 0] = 40
        yield x, x.roll(1, 1)
"""
CUT = {"table.weight": 0, "head.bias": 0, "second": 1, "penalty": 0}  # the dimension that has the words


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(MODEL)
    return tmp_path / "net.py"


def subject_of(path: Path, size: int):
    whole = captured_file(path)
    axes = choose(whole.capture.graph, find_axes(whole.capture).axes, size)
    subject = profile_of(whole.workload, of_team(whole.capture, axes, size)) if size > 1 else whole
    assert size == 1 or set(CUT) <= set(subject.capture.shards)
    return subject


def plan_of(subject, size: int, ranks: int = 1, schedule: str = "1f1b"):
    return dataclasses.replace(plan_for(subject, ranks, schedule, 2, BATCH), team=size)


def members_of(sessions, size: int) -> list[dict[str, torch.Tensor]]:
    members: list[dict[str, torch.Tensor]] = [{} for _ in range(size)]
    for process, session in enumerate(sessions):
        members[process % size].update(session.tensors())
    return members


def assert_as_in_plain_training(path: Path, items, weights: dict[str, torch.Tensor]) -> None:
    _, model, _ = oracle.train(path, items, 2)
    for name, expected in model.named_parameters():
        assert weights[name].shape == expected.shape
        assert float((weights[name] - expected.detach()).abs().mean()) < 2e-6, name


@pytest.mark.parametrize("size", [2, 3, 4])
def test_padding_stays_zero(path, size, tmp_path):
    subject = subject_of(path, size)
    pipeline = build(subject, plan_of(subject, size), tmp_path / "run", clip_grad_norm=0.5)
    items = minibatches(subject.workload, 3, BATCH)
    each = -(-WORDS // size)
    of_padding: list[float] = []

    def hook(process):
        own = min(each, WORDS - process * each)

        def read(stage, step, parameters):
            for name, dim in CUT.items():
                if name in parameters:
                    gradient = parameters[name].grad
                    of_padding.append(float(gradient.narrow(dim, own, each - own).abs().sum()))

        return read

    members = members_of(pipeline.train(items, on_gradients=hook), size)
    assert len(of_padding) == 3 * 3 * size
    assert not any(of_padding)
    for member, tensors in enumerate(members):
        own = min(each, WORDS - member * each)
        for name, dim in CUT.items():
            assert tensors[name].shape[dim] == each
            assert not tensors[name].narrow(dim, own, each - own).any()
    shards = subject.capture.shards
    weights = {
        name: joined([each[name] for each in members], shards[name].place, shards[name].size)
        if name in shards
        else tensor
        for name, tensor in members[0].items()
    }
    _, model, _ = oracle.train(path, items, 2, clip_norm=0.5)
    for name, expected in model.named_parameters():
        assert float((weights[name] - expected.detach()).abs().mean()) < 2e-6, name
    assert torch.equal(weights["penalty"], model.penalty)


def test_checkpoints_move_between_teams(path, tmp_path):
    """Weights, averages and the optimizer's state have the shapes of the complete model in every layout."""
    layouts = [(1, 1), (2, 1), (3, 2), (1, 2), (4, 1), (2, 2), (1, 1)]
    items = minibatches(captured_file(path).workload, len(layouts), BATCH)
    whole = {name: tuple(tensor.shape) for name, tensor in captured_file(path).capture.module.state_dict().items()}
    stored = []
    for step, (size, ranks) in enumerate(layouts):
        subject = subject_of(path, size)
        job = {"save": True, "ema": 0.5, "start_step": step if step else -1}
        pipeline = build(subject, plan_of(subject, size, ranks, "gpipe"), tmp_path / "run", **job)
        sessions = pipeline.train(items, steps=step + 1)
        shapes = Checkpoint(directory_of(pipeline.run.checkpoints, step + 1)).shapes()
        for name in ("table.weight", "head.bias", "second"):
            own = [shape for key, shape in shapes.items() if name in key and "step" not in key]
            assert own == [whole[name]] * 4, (size, name)  # the weight, its average and two moments
        stored.append(shapes)
    assert all(shapes == stored[0] for shapes in stored)
    assert_as_in_plain_training(path, items, pipeline.weights(sessions))


def test_replicas_that_are_padded_teams_divide_the_optimizer_state(path, tmp_path):
    """The weights are those without a division, bit for bit, and another team continues from the state."""
    subject = subject_of(path, 3)
    items = minibatches(subject.workload, 3, BATCH)
    plan = plan_of(subject, 3)
    stage = dataclasses.replace(plan.stages[0], ranks=(0, 1))
    complete = dataclasses.replace(plan, stages=(stage,), num_ranks=2)
    weights = []
    for name, each in (("complete", complete), ("divided", dataclasses.replace(complete, shard_optimizer=True))):
        build(subject, each, tmp_path / name, save=True).train(items[:2])
        other = subject_of(path, 2)
        resumed = build(other, plan_of(other, 2, 2), tmp_path / name, save=True, start_step=2)
        resumed.train(items, steps=3)
        checkpoint = Checkpoint(directory_of(resumed.run.checkpoints, 3))
        keys = [name for name in checkpoint.names if name.startswith("model.")]
        weights.append({key.removeprefix("model."): tensor for key, tensor in checkpoint.read(keys).items()})
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert_as_in_plain_training(path, items, weights[0])


def test_what_pads_a_member_is_not_compared_with_its_replica(path, tmp_path):
    """An optimizer may do anything with it. A difference of what is not padding is still refused."""
    subject = subject_of(path, 2)
    plan = plan_of(subject, 2)
    plan = dataclasses.replace(plan, stages=(dataclasses.replace(plan.stages[0], ranks=(0, 1)),), num_ranks=2)
    items = minibatches(subject.workload, 2, BATCH)

    def spoil(row):
        def hook(process):
            def change(stage, step, parameters):
                if process == 3:
                    parameters["head.bias"].grad[row] += 1.0

            return change

        return hook

    build(subject, plan, tmp_path / "padding", save=True).train(items, on_gradients=spoil(20))
    with pytest.raises(Exception, match=r"no longer equal: number 3 .* in .*head\.bias"):
        build(subject, plan, tmp_path / "word", save=True).train(items, on_gradients=spoil(19))


def test_old_versions_of_weights_move_between_teams(path, tmp_path):
    items = minibatches(captured_file(path).workload, 4, BATCH)
    weights = []
    for name, sizes in (("one", (1, 1)), ("teams", (2, 3))):
        for steps, size in zip((2, 4), sizes, strict=True):
            subject = subject_of(path, size)
            job = {"save": True, "start_step": steps - 2 or -1}
            pipeline = build(subject, plan_of(subject, size, 2, "2bw"), tmp_path / name, **job)
            pipeline.train(items, steps=steps)
        checkpoint = Checkpoint(directory_of(pipeline.run.checkpoints, 4))
        assert "version.3.table.weight" in checkpoint.names
        weights.append(checkpoint.read([key for key in checkpoint.names if key.startswith(("model.", "version."))]))
    assert weights[0].keys() == weights[1].keys()
    for key, tensor in weights[0].items():
        assert tensor.shape == weights[1][key].shape
        assert float((tensor - weights[1][key]).abs().mean()) < 2e-6, key


def test_a_model_with_another_vocabulary_is_refused_although_members_have_equal_parts(path):
    subject = subject_of(path, 2)
    graph, model = subject.capture.graph, subject.workload.build_model()
    assert graph.parameters["second"].shape == (12, 21)
    assert graph.model_shapes["second"] == (12, 41)
    refuse_other_parameters(graph, model, path)
    model.second = torch.nn.Parameter(torch.zeros(12, 42))
    with pytest.raises(RunError, match=r"second was \[12, 41\] and is \[12, 42\]"):
        refuse_other_parameters(graph, model, path)

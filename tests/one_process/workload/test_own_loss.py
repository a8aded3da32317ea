"""A loss with parameters is trained with the model, as in a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.surveyed import surveyed
from support.oracle import train
from support.pipelines import Pipeline, build, captured_file, minibatches, plan_for, staleness_of

from autopipe.errors import ModelFileError, TraceError
from autopipe.trace import capture
from autopipe.verify.check import compare
from autopipe.workload import LoadOptions, load_workload

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 12))

def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for _ in range(12):
        yield torch.randn(batch_size, 8, generator=g), torch.randint(0, 5, (batch_size,), generator=g)

evaluate_data = data
"""
LOSSES = {
    "arcface": """
class ArcFace(nn.Module):
    def __init__(self, features=12, classes=5):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, features))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.project = nn.Linear(features, features)
    def forward(self, output, target):
        cosine = F.normalize(self.project(output)) @ F.normalize(self.weight).T
        return F.cross_entropy(self.scale.exp() * (cosine - 0.2 * F.one_hot(target, 5)), target)

loss = ArcFace
""",
    "uncertainty": """
class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_variances = nn.Parameter(torch.tensor([0.3, -0.2]))
    def forward(self, output, target):
        first = F.cross_entropy(output[:, :5], target)
        second = (output[:, 5] - target).square().mean()
        weights = (-self.log_variances).exp()
        return weights[0] * first + weights[1] * second + self.log_variances.sum()

loss = Weighted()
""",
    "frozen features and centers": """
class Centers(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Linear(12, 6).requires_grad_(False)
        self.centers = nn.Embedding(5, 6)
        self.register_buffer("margin", torch.tensor(0.5))
    def forward(self, output, target):
        away = self.features(output) - self.centers(target)
        return away.square().sum(1).mul(self.margin).mean() + F.cross_entropy(output[:, :5], target)

loss = Centers()
""",
    "a moving center": """
class Center(nn.Module):
    def __init__(self):
        super().__init__()
        self.follow = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.register_buffer("center", torch.zeros(5))
    def forward(self, output, target):
        value = F.cross_entropy(output[:, :5] - self.center, target)
        with torch.no_grad():
            self.center.mul_(0.9).add_(output[:, :5].mean(0), alpha=0.1)
        return value

loss = Center()
""",
}


def pipeline_of(folder: Path, loss: str, stages: int, schedule: str, **job: object) -> tuple[Path, Pipeline]:
    path = folder / "own.py"
    path.write_text(MODEL + LOSSES[loss])
    subject = captured_file(path)
    return path, build(subject, plan_for(subject, stages, schedule, 4, 8), folder / "run", **job)


@pytest.mark.parametrize(
    ("loss", "stages", "schedule"),
    [("arcface", 3, "1f1b"), ("uncertainty", 2, "2bw"), ("frozen features and centers", 3, "pipedream")],
)
def test_a_loss_with_parameters_trains_as_in_a_plain_loop(
    loss: str, stages: int, schedule: str, tmp_path: Path
) -> None:
    path, pipeline = pipeline_of(tmp_path, loss, stages, schedule)
    items = minibatches(pipeline.captured.workload, 5, 8, last=7)
    ours = pipeline.weights(pipeline.train(items))
    _, model, _ = train(path, items, 4, staleness=staleness_of(pipeline.plan))
    expected = model.state_dict() | vars(model)["criterion"].state_dict(prefix="loss.")
    assert expected.keys() == ours.keys()
    assert "also trains the parameters of the loss" in pipeline.captured.workload.choice.note
    assert [name for name in expected if not torch.equal(expected[name], ours[name])] == []
    initial = pipeline.captured.workload.build_model().state_dict()
    moved = {n for n in ours if n.startswith("loss.") and not torch.equal(ours[n], initial[n])}
    assert moved == {n for n in ours if n.startswith("loss.") and "features" not in n and "margin" not in n}


def test_a_loss_with_parameters_may_change_a_buffer(tmp_path: Path) -> None:
    path, pipeline = pipeline_of(tmp_path, "a moving center", 2, "1f1b")
    items = minibatches(pipeline.captured.workload, 5, 8)
    ours = pipeline.weights(pipeline.train(items))
    _, model, _ = train(path, items, 4)
    expected = model.state_dict() | vars(model)["criterion"].state_dict(prefix="loss.")
    assert float(expected["loss.center"].abs().sum()) > 0
    assert [name for name in expected if not torch.equal(expected[name], ours[name])] == []


CHANGES = {
    "in place": "self.center.mul_(0.9).add_(output[:, :5].mean(0), alpha=0.1)",
    "bound to a new tensor": "self.center = self.center * 0.9 + output[:, :5].mean(0) * 0.1",
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_loss_without_parameters_may_change_a_buffer_which_only_checkpoints_contain(
    change: str, tmp_path: Path
) -> None:
    path = tmp_path / "own.py"
    text = LOSSES["a moving center"].replace("self.follow = nn.Parameter(torch.zeros(()), requires_grad=False)", "")
    path.write_text(MODEL + text.replace(CHANGES["in place"], CHANGES[change]))
    subject = captured_file(path)
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 4, 8), tmp_path / "run")
    items = minibatches(subject.workload, 5, 8)
    ours = pipeline.weights(pipeline.train(items))
    _, model, _ = train(path, items, 4)
    expected = model.state_dict() | {"loss.center": vars(model)["criterion"].center}
    assert float(expected["loss.center"].abs().sum()) > 0
    assert [name for name in expected if not torch.equal(expected[name], ours[name])] == []
    assert "loss.center" not in subject.workload.build_model().state_dict()


def test_a_data_hook_that_changes_the_loss_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        MODEL.replace("    for _ in range(12):", "    for _ in range(12):\n        loss.center[0].add_(0.1)")
        + LOSSES["a moving center"]
    )
    first = surveyed(path).first
    assert first is not None
    assert "the parameter or buffer center is written or replaced outside of forward and loss" in first.text


def test_a_check_compares_the_parameters_of_the_loss(tmp_path: Path) -> None:
    _, pipeline = pipeline_of(tmp_path, "arcface", 3, "1f1b", steps=2)
    items = minibatches(pipeline.captured.workload, 2, 8)
    comparison = compare(pipeline.captured.workload, pipeline.run, pipeline.job, pipeline.context, items, draws=True)
    assert comparison.bitwise
    assert {"loss.weight", "loss.scale", "loss.project.bias"} <= {
        difference.name for difference in comparison.differences
    }


def test_initial_weights_of_the_loss_are_drawn_after_those_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(MODEL + LOSSES["arcface"])
    workload = load_workload(LoadOptions(str(path), seed=5))
    torch.manual_seed(5)
    torch.nn.ModuleList([torch.nn.Linear(8, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 12)])
    wanted = torch.randn(5, 12)
    for _ in range(2):
        assert torch.equal(dict(workload.build_model().named_parameters())["loss.weight"], wanted)


def test_a_loss_function_that_uses_a_module_with_parameters_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    text = LOSSES["uncertainty"].replace("loss = Weighted()", "criterion = Weighted()")
    path.write_text(MODEL + text + "def loss(output, target):\n    return criterion(output, target)\n")
    with pytest.raises(TraceError, match="not a parameter of the model") as caught:
        capture(load_workload(LoadOptions(str(path))))
    assert "loss = criterion" in caught.value.remedy


@pytest.mark.parametrize(
    "built",
    [
        "def build_model():\n    net = Net()\n    net.scale = loss.scale\n    return net",
        "model = Net()\nloss.all = model",
    ],
)
def test_a_loss_that_shares_a_parameter_with_the_model_is_refused(built: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    text = LOSSES["arcface"].replace("loss = ArcFace", "loss = ArcFace()")
    net = "\nclass Net(nn.Linear):\n    def __init__(self):\n        super().__init__(8, 12)\n"
    path.write_text(MODEL.replace("def build_model", "def other") + text + net + built)
    with pytest.raises(ModelFileError, match="share a parameter: ") as caught:
        load_workload(LoadOptions(str(path))).build_model()
    assert "own.py" in caught.value.where

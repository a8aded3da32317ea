"""A buffer that the forward binds to a new tensor is trained as in a plain loop, and the model can still be cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.oracle import train
from support.pipelines import build, captured_file, minibatches, plan_for

from autopipe.errors import TraceError
from autopipe.trace import capture
from autopipe.workload import LoadOptions, load_workload

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

class Center(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, width))
        self.register_buffer("mean", torch.full((1, width), 0.1))
        self.register_buffer("old", torch.full((1, width), 0.2))
    def forward(self, x):
        {body}

def build_model():
    return nn.Sequential(nn.Linear(8, 8), Center(), nn.Tanh(), nn.Linear(8, 8), Center(), nn.Linear(8, 5))

def loss(output, target):
    return F.cross_entropy(output, target)

def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for _ in range(12):
        yield torch.randn(batch_size, 8, generator=g), torch.randint(0, 5, (batch_size,), generator=g)
"""
NEW = "self.mean * 0.9 + x.detach().mean(0, keepdim=True) * 0.1"
TRAINED = {
    "that autograd keeps": f"y = x * self.mean.view(-1)\nself.mean = {NEW}\nreturn y * self.scale",
    "several times": f"y = x * self.mean\nself.mean = {NEW}\ny = y + self.mean\nself.mean = self.mean.clamp(-1, 1)\n"
    "self.mean.mul_(0.9)\nreturn y * self.scale",
    "swapped": f"y = x * self.mean - self.old\nself.mean, self.old = self.old, {NEW}\nreturn y * self.scale",
    "by its data": f"y = x - self.mean\nself.mean.data = {NEW}\nreturn y * self.scale",
    "unread, with a gradient": "self.mean = self.mean * 0.9 + x.mean(0, keepdim=True) * 0.1\nreturn x * self.scale",
    "in code that depends on the data": f"y = x * self.mean\nif x.sum() > 0:\n    self.mean = {NEW}\n"
    "return y * self.scale",
}
REFUSED = {
    "y = x - self.mean\nself.mean = self.mean + x.mean(0, keepdim=True)\nreturn y": (
        "buffer 1.mean is bound to a tensor with a gradient",
        "detach()",
    ),
    "y = x * self.scale\nself.scale.data = self.scale.data * 0.9\nreturn y": (
        "changes parameter 1.scale (x.data = y)",
        "after_step",
    ),
    "y = x * self.scale\nself.scale = nn.Parameter(self.scale.detach() * 0.9)\nreturn y": (
        "parameter 1.scale is bound to a new tensor",
        "after_step",
    ),
}


def written(folder: Path, body: str) -> Path:
    path = folder / "rebound.py"
    path.write_text(MODEL.replace("{body}", body.replace("\n", "\n        ")))
    return path


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("name", list(TRAINED))
def test_a_rebound_buffer_trains_as_in_a_plain_loop(name: str, recompute: str, tmp_path: Path) -> None:
    path = written(tmp_path, TRAINED[name])
    subject = captured_file(path)
    plan = plan_for(subject, 2, "1f1b", 4, 8, recompute=recompute)
    assert len(plan.stages) == 2
    pipeline = build(subject, plan, tmp_path / "run")
    items = minibatches(subject.workload, 4, 8)
    ours = pipeline.weights(pipeline.train(items))
    _, model, _ = train(path, items, 4)
    expected = model.state_dict()
    assert [key for key in expected if not torch.equal(expected[key], ours[key])] == []
    assert not torch.equal(expected["4.mean"], subject.workload.build_model().state_dict()["4.mean"])


@pytest.mark.parametrize("body", list(REFUSED))
def test_what_no_buffer_can_replace_is_refused_by_name_with_its_line(body: str, tmp_path: Path) -> None:
    what, remedy = REFUSED[body]
    with pytest.raises(TraceError) as caught:
        capture(load_workload(LoadOptions(str(written(tmp_path, body)))))
    assert what in caught.value.what
    assert remedy in caught.value.remedy
    assert "self." in caught.value.where

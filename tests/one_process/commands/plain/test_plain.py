"""``autopipe plain``: the script runs without autopipe and trains the weights of the stages."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.opaque import write
from support.pipelines import build, captured, captured_file, plan_for, profile_of
from support.plain_scripts import compared, is_equal
from support.warm.programs import run_warm

from autopipe.commands.plain.plain import Subject, written
from autopipe.commands.plain.script import script
from autopipe.errors import RunError
from autopipe.trace import capture
from autopipe.workload import LoadOptions, load_workload

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = """
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(16, width), nn.Linear(width, 16), nn.Tanh(), nn.Dropout(0.1))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 16)
    def forward(self, ids):
        return self.head(self.norm(self.body(ids).transpose(1, 2)).transpose(1, 2))

def build_model(width=8):
    return Net(width)

CLASS_WEIGHTS = torch.linspace(0.5, 1.5, 16)

def loss(output, target):
    return %(loss)s

class Batches:  # from the global generators, five an epoch
    def __init__(self, batch_size=6):
        self.batch_size = batch_size
    def __iter__(self):
        for _ in range(5):
            n = self.batch_size - int(np.random.randint(0, 2))
            ids = torch.randint(0, 16, (n, 9))
            lengths = torch.randint(1, 10, (n,))
            lengths[:2] = 0
            yield ids, ids.masked_fill(torch.arange(9)[None] >= lengths[:, None], -100)

def data(batch_size=6):
    return Batches(batch_size)

def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.2, momentum=0.9)

def scheduler(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
"""
_FLAT = "output.flatten(0, 1), target.flatten()"
LOSSES = {
    "token mean": f"F.cross_entropy({_FLAT})",
    "class weights": f"F.cross_entropy({_FLAT}, weight=CLASS_WEIGHTS)",
    "sum": f"F.cross_entropy({_FLAT}, reduction='sum') * 0.01",
    "weighted": f"(F.cross_entropy({_FLAT}, reduction='sum') / (target >= 0).sum().clamp(min=1), (target >= 0).sum())",
    "two terms": f"F.cross_entropy({_FLAT}, reduction='sum') / (target >= 0).sum().clamp(min=1) + output.pow(2).mean()",
    "samples": "F.mse_loss(output.mean(-1), target.float())",
}


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "pipedream"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_script_trains_the_weights_of_the_stages(name: str, schedule: str, tmp_path: Path) -> None:
    if schedule != "1f1b" and name not in ("token mean", "weighted"):
        pytest.skip("a loss and a schedule meet only in the share of a microbatch")
    path = tmp_path / "model.py"
    path.write_text(MODEL % {"loss": LOSSES[name]})
    subject = captured_file(path, (("width", "12"),))
    plan = plan_for(subject, 2, schedule, 4, 6)
    clip = 0.0 if name == "sum" else 1.0
    assert is_equal(compared(subject, plan, 7, tmp_path, clip_grad_norm=clip if schedule != "pipedream" else 0.0))


@pytest.mark.parametrize("sample", ["gpt", "hf_llama"])
def test_a_sample_model_equals_its_script(sample: str, tmp_path: Path) -> None:
    subject = captured(sample)
    assert is_equal(compared(subject, plan_for(subject, 2, "1f1b", 3, 6), 3, tmp_path, clip_grad_norm=0.5))


def test_a_script_scales_the_loss_in_float16(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL % {"loss": LOSSES["token mean"]})
    workload = load_workload(LoadOptions(str(path), precision="fp16"))
    subject = profile_of(workload, capture(workload, batch_size=5))
    assert is_equal(compared(subject, plan_for(subject, 2, "1f1b", 4, 6), 4, tmp_path, clip_grad_norm=1.0))
    assert "GradScaler" in (tmp_path / "loop.py").read_text()


@pytest.mark.parametrize("name", ["experts", "layer_drop"])
def test_opaque_modules_draw_the_same_numbers_in_the_script(name: str, tmp_path: Path) -> None:
    subject = captured_file(write(name, tmp_path))
    assert subject.workload.spec.opaque_modules
    assert is_equal(compared(subject, plan_for(subject, 3, "1f1b", 4, 8), 4, tmp_path))


def test_without_an_argument_the_script_writes_its_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL % {"loss": LOSSES["samples"]})
    subject = captured_file(path)
    plan = plan_for(subject, 2, "gpipe", 2, 6)
    pipeline = build(subject, plan, tmp_path / "run")
    text, loop = written(Subject(subject.workload, plan, pipeline.context, pipeline.job, pipeline.run.stages, 2))
    assert loop.divisor is None
    (tmp_path / "loop.py").write_text(text)
    run_warm(str(tmp_path / "loop.py"), cwd=tmp_path)
    saved = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert saved.keys() == subject.workload.build_model().state_dict().keys()
    (tmp_path / "plain.pt").unlink()
    done = run_warm(str(tmp_path / "loop.py"), "model.safetensors", cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "there is no file model.safetensors: write it with `autopipe export RUN -o model.safetensors`" in done.stderr


def test_no_text_of_a_plan_becomes_code_of_the_script(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL % {"loss": LOSSES["samples"]})
    subject = captured_file(path)
    plan = plan_for(subject, 2, "gpipe", 2, 6)
    pipeline = build(subject, plan, tmp_path / "run")
    _, loop = written(Subject(subject.workload, plan, pipeline.context, pipeline.job, pipeline.run.stages, 2))
    stranger = 'cpu"; STRANGER = 1 #'
    notes = ('the sum of x""" + str(STRANGER) + """ is another', "\\")
    loop = dataclasses.replace(loop, device=stranger, autocast="torch.bfloat16", title='net"""', notes=notes)
    tree = ast.parse(script(loop))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "STRANGER"]
    assert [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value == stranger]


@pytest.mark.parametrize(
    ("job", "reason"), [({"deferred_batch_norm": True}, "deferred"), ({"init_from": "w.pt"}, "--init-from")]
)
def test_a_plan_that_a_script_cannot_express_is_refused(job: dict[str, Any], reason: str, tmp_path: Path) -> None:
    subject = captured("gpt")
    plan = plan_for(subject, 2, "1f1b", 2, 6)
    pipeline = build(subject, plan, tmp_path / "run", **job)
    with pytest.raises(RunError, match=reason):
        written(Subject(subject.workload, plan, pipeline.context, pipeline.job, pipeline.run.stages, 2))

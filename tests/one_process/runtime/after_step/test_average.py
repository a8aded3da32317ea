"""``--ema``: averaged weights equal torch's ``AveragedModel`` in a plain loop, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models.after_step import MODELS, text
from support.oracle import train
from support.pipelines import (
    Captured,
    Pipeline,
    build,
    captured_file,
    minibatches,
    plan_for,
    staleness_of,
    with_exact_ties,
)
from support.schedule_cases import compared, laid_out

from autopipe.commands.planning.choose import with_averages
from autopipe.errors import ArtifactError
from autopipe.planning.requests import PlanRequest
from autopipe.runtime.after_step import Averages
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.job import Job

pytestmark = pytest.mark.usefixtures("one_thread")

DECAY, STEPS = 0.7, 5
BODY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight
    def forward(self, ids):
        h = self.words(ids).mean(1)
        for layer in self.layers:
            h = torch.dropout(torch.tanh(layer(h)), 0.1, self.training)
        return self.head(self.frozen(self.norm(h)))

def build_model():
    return Net().to(torch.DTYPE)

loss = nn.CrossEntropyLoss()

def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters if p.requires_grad], lr=0.5, momentum=0.9)

def data(batch_size=8):
    g = torch.Generator().manual_seed(3)
    for _ in range(12):
        yield torch.randint(0, 11, (batch_size, 4), generator=g), torch.randint(0, 11, (batch_size,), generator=g)
"""


def subject_of(folder: Path, dtype: str = "float32") -> Captured:
    path = folder / "net.py"
    path.write_text(BODY.replace("DTYPE", dtype))
    return captured_file(path)


def assert_averaged(pipeline: Pipeline, items, ours: dict[str, torch.Tensor]) -> None:
    plan = pipeline.plan
    path = Path(plan.workload.target)
    _, model, _ = train(path, items, plan.num_microbatches, staleness=staleness_of(plan), ema=DECAY)
    averaged = dict(vars(model)["averaged"].module.named_parameters())
    moving = {f"ema.{name}" for name in pipeline.captured.capture.graph.moving}
    assert {name for name in ours if name.startswith("ema.")} == moving
    assert [n for n in averaged if not torch.equal(ours.get(f"ema.{n}", ours[n]), averaged[n])] == []
    assert any(not torch.equal(averaged[n], ours[n]) for n in averaged)


@pytest.mark.parametrize(("stages", "schedule"), [(1, "1f1b"), (3, "1f1b"), (2, "2bw")])
def test_averages_equal_torchs_averaged_model_in_a_plain_loop(stages: int, schedule: str, tmp_path: Path) -> None:
    subject = subject_of(tmp_path)
    plan = with_exact_ties(plan_for(subject, stages, schedule, 4, 8))
    pipeline = build(subject, plan, tmp_path / "run", ema=DECAY)
    items = minibatches(subject.workload, STEPS, 8)
    assert_averaged(pipeline, items, pipeline.weights(pipeline.train(items)))


def test_parameters_are_averaged_after_the_after_step_hook(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(text(*MODELS["a momentum teacher"]))
    subject = captured_file(path)
    pipeline = build(subject, plan_for(subject, 3, "1f1b", 4, 8), tmp_path / "run", ema=DECAY)
    items = minibatches(subject.workload, STEPS, 8)
    ours = pipeline.weights(pipeline.train(items))
    assert "ema.teacher.0.weight" in ours
    assert_averaged(pipeline, items, ours)


@pytest.mark.parametrize("began_with", [DECAY, 0.0])
def test_a_resumed_run_continues_its_averages_or_starts_them(began_with: float, tmp_path: Path) -> None:
    subject = subject_of(tmp_path)
    items = minibatches(subject.workload, STEPS, 8)
    plans = [with_exact_ties(plan_for(subject, count, "1f1b", 4, 8)) for count in (3, 2)]
    first = build(subject, plans[0], tmp_path / "run", save=True, ema=began_with)
    first.train(items[:3])
    saved = Checkpoint.latest(first.run.checkpoints)
    assert saved is not None and saved.manifest.options is not None and saved.manifest.options.ema == began_with
    second = build(subject, plans[1], first.run.path, start_step=3, ema=DECAY)
    sessions = second.train(items)
    ours = second.weights(sessions)
    if began_with:
        assert_averaged(second, items, ours)
        return
    weights = {}
    for count in (4, 5):
        pipeline = build(subject, plans[1], tmp_path / f"run{count}")
        weights[count] = pipeline.weights(pipeline.train(items[:count]))
    expected = {name: weights[4][name].lerp(weights[5][name], 1 - DECAY) for name in subject.capture.graph.moving}
    assert all(torch.equal(ours[f"ema.{name}"], expected[name]) for name in expected)


def test_averages_of_bfloat16_weights_are_float32(tmp_path: Path) -> None:
    subject = subject_of(tmp_path, "bfloat16")
    plan = with_exact_ties(plan_for(subject, 2, "1f1b", 4, 8))
    items = minibatches(subject.workload, 3, 8)
    pipeline = build(subject, plan, tmp_path / "run", ema=DECAY)
    ours = pipeline.weights(pipeline.train(items))
    assert {ours[name].dtype for name in ours if name.startswith("ema.")} == {torch.float32}
    expected: dict[str, torch.Tensor] = {}
    for count in (1, 2, 3):
        other = build(subject, plan, tmp_path / f"run{count}")
        for name, weight in other.weights(other.train(items[:count])).items():
            now = weight.float()
            expected[name] = expected[name] + (now - expected[name]) * (1 - DECAY) if name in expected else now
    for name in subject.capture.graph.moving:
        torch.testing.assert_close(ours[f"ema.{name}"], expected[name], rtol=1e-6, atol=1e-7)


def test_a_check_compares_averages_and_finds_a_wrong_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(tmp_path)
    plan = laid_out(plan_for(subject, 2, "1f1b", 4, 8), "1f1b", ((0, 1), (2,)))
    comparison = compared(subject, plan, tmp_path / "run", steps=3, last=8, ema=DECAY)
    assert comparison.bitwise and {"ema.words.weight", "ema.norm.bias"} <= {d.name for d in comparison.differences}
    original = Averages.update

    def twice(self: Averages, stage: int) -> None:
        original(self, stage)
        if stage == 1:
            original(self, stage)

    monkeypatch.setattr(Averages, "update", twice)
    comparison = compared(subject, plan, tmp_path / "other", steps=3, last=8, ema=DECAY)
    wrong = {difference.name for difference in comparison.differences if not difference.bitwise}
    assert wrong and all(name.startswith("ema.") for name in wrong)
    assert {difference.owner for difference in comparison.differences if difference.name in wrong} == {1}


@pytest.mark.parametrize(("dtype", "per_byte"), [("float32", 1.0), ("bfloat16", 2.0), ("float64", 1.0)])
def test_the_memory_of_averages_is_part_of_a_plan(dtype: str, per_byte: float, tmp_path: Path) -> None:
    subject = subject_of(tmp_path, dtype)
    profile = subject.profile
    counted = with_averages(profile, PlanRequest(averages=True))
    assert counted.optimizer_bytes_per_byte == profile.optimizer_bytes_per_byte + per_byte
    assert with_averages(profile, PlanRequest()) == profile
    plans = [plan_for(replace(subject, profile=p), 2, "1f1b", 4, 8) for p in (profile, counted)]
    more = sum(b.peak_bytes - a.peak_bytes for a, b in zip(plans[0].stages, plans[1].stages, strict=True))
    trained = sum(s.num_bytes({}) for s in subject.capture.graph.parameters.values() if s.requires_grad)
    assert more == pytest.approx(per_byte * trained, abs=4)


def test_a_checkpoint_that_lacks_one_of_its_averages_is_refused(tmp_path: Path) -> None:
    subject = subject_of(tmp_path)
    pipeline = build(subject, plan_for(subject, 1, "1f1b", 4, 8), tmp_path / "run", save=True, ema=DECAY)
    pipeline.train(minibatches(subject.workload, 1, 8))
    saved = Checkpoint.latest(pipeline.run.checkpoints)
    assert saved is not None
    parameters = dict(subject.workload.build_model().named_parameters())
    with pytest.raises(ArtifactError, match=r"average\.frozen"):
        Averages(DECAY, {0: parameters}).restore(0, saved, lambda name, tensor: tensor)


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="decay"):
        Job(steps=1, epochs=0, batch_size=1, ema=decay)

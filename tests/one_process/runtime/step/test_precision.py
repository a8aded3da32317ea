"""Autocast and loss scaling equal a plain script's, whichever stage overflows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.pipelines import BATCH, build, captured_file, minibatches, plan_for, profile_of
from support.samples import SAMPLES

from autopipe.errors import PlanError, TraceError
from autopipe.runtime.step.scaler import LossScaler
from autopipe.trace import capture
from autopipe.verify.check import compare
from autopipe.workload import LoadOptions, load_workload

OVERFLOW = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

def loss(output, target):
    return (output - target).pow(2).mean()

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for step in range(6):
        big = 3e3 if step == 2 else 1.0   # its gradient is beyond float16 once it is scaled
        yield torch.randn(batch_size, 8, generator=g), big * torch.randn(batch_size, 1, generator=g)

def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.01, momentum=0.9)
"""


def lstm_runs_in_bf16() -> bool:
    """Whether torch has a kernel for it: on some processors, oneDNN has not."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(4, 4)(torch.zeros(2, 1, 4))
    except RuntimeError as error:
        assert "primitive" in str(error)
        return False
    return True


def pipeline(path: Path, precision: str, num_stages: int, batch_size: int, folder: Path, schedule: str = "1f1b", **job):
    workload = load_workload(LoadOptions(str(path), precision=precision))
    subject = profile_of(workload, capture(workload))
    plan = plan_for(subject, num_stages, schedule, 4, batch_size)
    return subject, build(subject, plan, folder, **job)


@pytest.mark.parametrize("sample", ["resnet", "unet", "seq2seq_lstm"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_bf16_is_within_the_noise_of_plain_autocast(sample: str, num_stages: int, tmp_path: Path) -> None:
    if sample == "seq2seq_lstm" and not lstm_runs_in_bf16():
        with pytest.raises(TraceError, match="could not create a primitive") as raised:
            pipeline(SAMPLES / f"{sample}.py", "bf16", num_stages, BATCH[sample], tmp_path, steps=3)
        assert "--precision fp32" in raised.value.remedy
        return
    built, made_pipeline = pipeline(SAMPLES / f"{sample}.py", "bf16", num_stages, BATCH[sample], tmp_path, steps=3)
    assert any("autocast(cpu" in node.context for node in built.capture.graph.nodes)
    items = minibatches(built.workload, 3, BATCH[sample], last=BATCH[sample] - 1)
    comparison = compare(
        built.workload, made_pipeline.run, made_pipeline.job, made_pipeline.context, items, draws=sample != "resnet"
    )
    assert comparison.equal, comparison.max_relative_error
    assert any("autocast" in reason for reason in comparison.reasons)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_fp16_skips_a_step_on_every_stage_if_one_overflows(num_stages: int, clip: float, tmp_path: Path) -> None:
    path = tmp_path / "overflow.py"
    path.write_text(OVERFLOW)
    built, made_pipeline = pipeline(path, "fp16", num_stages, 8, tmp_path / "run", steps=6, clip_grad_norm=clip)
    items = minibatches(built.workload, 6, 8)
    comparison = compare(
        built.workload, made_pipeline.run, made_pipeline.job, made_pipeline.context, items, draws=False
    )
    assert comparison.equal, (comparison.max_relative_error, comparison.noise)
    sessions = made_pipeline.train(items)
    scales = {session.executor.stepper.scaler.scale for session in sessions}
    assert scales == {32768.0}  # halved once, at the third minibatch


def test_an_asynchronous_schedule_refuses_float16(tmp_path: Path) -> None:
    path = tmp_path / "overflow.py"
    path.write_text(OVERFLOW)
    built, made_pipeline = pipeline(path, "fp16", 2, 8, tmp_path / "run", "2bw", steps=2)
    with pytest.raises(PlanError, match="2bw does not work with fp16"):
        made_pipeline.train(minibatches(built.workload, 2, 8))


def test_the_scale_follows_the_rule_of_torch() -> None:
    ours, theirs = LossScaler(interval=3), torch.amp.GradScaler("cpu", growth_interval=3)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for overflow in [False, True, False, False, False, False, True, True, False]:
        theirs.scale(torch.zeros(()))
        parameter.grad = torch.tensor([float("inf") if overflow else 1.0])
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflow)
        assert ours.scale == theirs.get_scale()


def test_another_precision_is_another_graph() -> None:
    full = captured_file(SAMPLES / "resnet.py").capture.graph
    half = capture(load_workload(LoadOptions(str(SAMPLES / "resnet.py"), precision="bf16"))).graph
    assert full.digest != half.digest

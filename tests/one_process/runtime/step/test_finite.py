"""A loss or gradient that is not finite ends the run, is reported, or is skipped by every rank; never ignored."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipelines import Pipeline, build, captured_file, minibatches, plan_for
from torch import nn

from autopipe.commands.training.listener import Listener
from autopipe.errors import RunError
from autopipe.runtime.events import Silent
from autopipe.runtime.session import RankSession
from autopipe.runtime.step.finite import FiniteBuffers, all_finite, first_nonfinite
from autopipe.verify.check import compare
from autopipe.verify.comparison import Comparison

MODEL = """
import torch
from torch import nn

def build_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    )

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def data(batch_size=8):
    g = torch.Generator().manual_seed(1)
    for _ in range(8):
        yield torch.randn(batch_size, 6, generator=g), torch.randint(0, 3, (batch_size,), generator=g)
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e4])
def test_one_element_of_any_kind_is_seen(dtype: torch.dtype, value: float) -> None:
    tensors = [torch.ones(7, 5, dtype=dtype), torch.zeros(0, dtype=dtype), torch.ones(4, dtype=dtype)]
    tensors[0][3, 2] = value
    assert all_finite(tensors) == math.isfinite(value)


class Told(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})


def pipeline(folder: Path, schedule: str = "1f1b", **job: Any) -> Pipeline:
    path = folder / "net.py"
    path.write_text(MODEL)
    subject = captured_file(path)
    return build(subject, plan_for(subject, 2, schedule, 4, 8), folder / "run", **job)


def items(built: Pipeline, *bad: int) -> list[Any]:
    """Return minibatches of which the given ones hold one NaN."""
    batches = minibatches(built.captured.workload, 6, 8)
    for index in bad:
        batches[index][0][5, 0] = float("nan")
    return batches


def trained(built: Pipeline, batches: list[Any]) -> tuple[list[RankSession], list[dict[str, Any]]]:
    reporters = [Told(), Told()]
    sessions = built.train(batches, reporters=reporters)
    return sessions, [event for one in reporters for event in one.events if event["kind"] == "nonfinite"]


def test_stop_names_the_step_and_leaves_the_weights_unchanged(tmp_path: Path) -> None:
    built = pipeline(tmp_path, on_nonfinite="stop")
    reporters = [Told(), Told()]
    with pytest.raises(RunError, match=r"step 4 is not finite: (its loss|the gradient of)") as caught:
        try:
            built.train(items(built, 3), reporters=reporters)
        except Exception as error:
            raise error.__cause__ or error from None
    assert caught.value.exit_code == 1
    seen = [event for one in reporters for event in one.events if event["kind"] == "nonfinite"]
    assert {(event["step"], event["policy"]) for event in seen} == {(3, "stop")}


def test_warn_reports_the_step_and_continues(tmp_path: Path) -> None:
    built = pipeline(tmp_path, on_nonfinite="warn")
    sessions, reporters = trained(built, items(built, 4))
    losses = sessions[0].executor.stepper.losses
    assert math.isnan(losses[4]) and math.isnan(losses[5])  # the weights are NaN, as in a plain loop
    assert [(event["step"], event["policy"]) for event in reporters] == [(4, "warn"), (5, "warn")]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "2bw", "pipedream"])
def test_skip_skips_the_step_on_every_rank(tmp_path: Path, schedule: str) -> None:
    built = pipeline(tmp_path, schedule, on_nonfinite="skip")
    sessions, reporters = trained(built, items(built, 2))
    losses = sessions[0].executor.stepper.losses
    assert [step for step, loss in losses.items() if math.isnan(loss)] == [2]
    assert [(event["step"], event["policy"]) for event in reporters] == [(2, "skip")]
    assert all(tensor.isfinite().all() for tensor in built.weights(sessions).values())


def test_a_run_with_skipped_steps_equals_a_run_without_their_minibatches(tmp_path: Path) -> None:
    built = pipeline(tmp_path, on_nonfinite="skip")
    skipped, _ = trained(built, items(built, 1, 4))
    (tmp_path / "plain").mkdir()
    other = pipeline(tmp_path / "plain", on_nonfinite="stop")
    clean = items(other)
    whole, reporters = trained(other, [clean[index] for index in (0, 2, 3, 5)])
    assert reporters == []
    ours, theirs = built.weights(skipped), other.weights(whole)
    for name, tensor in theirs.items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(ours[name], tensor), name


def test_a_finite_run_is_equal_bit_for_bit_under_every_policy(tmp_path: Path) -> None:
    runs = []
    for policy in ("stop", "warn", "skip"):
        (tmp_path / policy).mkdir()
        built = pipeline(tmp_path / policy, on_nonfinite=policy)
        runs.append(built.weights(trained(built, items(built))[0]))
    for other in runs[1:]:
        assert all(torch.equal(runs[0][name], other[name]) for name in runs[0])


def compared(built: Pipeline, batches: list[Any]) -> Comparison:
    job = replace(built.job, steps=len(batches), on_nonfinite="warn")
    return compare(built.captured.workload, built.run, job, built.context, batches, draws=False)


def test_check_accepts_no_value_that_is_not_finite(tmp_path: Path) -> None:
    built = pipeline(tmp_path)
    comparison = compared(built, items(built, 2)[:3])
    assert comparison.nonfinite.startswith(
        "both not finite at step 3: the loss is nan in stages and nan in plain training"
    )
    assert not comparison.equal and not comparison.bitwise
    assert comparison.max_relative_error == float("inf")
    fine = compared(built, items(built))
    assert fine.equal and fine.bitwise and fine.nonfinite == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_detected(value: float) -> None:
    assert all_finite([]) and all_finite([torch.zeros(0)]) and all_finite([torch.ones(3), torch.full((2,), 1e38)])
    assert not all_finite([torch.ones(3), torch.tensor([1.0, value])])
    layer = nn.Linear(2, 2)
    layer.weight.grad, layer.bias.grad = torch.ones(2, 2), torch.tensor([0.0, value])
    assert first_nonfinite(dict(layer.named_parameters())) == "bias"


def test_running_statistics_of_a_skipped_step_are_restored() -> None:
    layer = nn.Sequential(nn.BatchNorm1d(2))
    kept = FiniteBuffers(layer, ["0.running_mean", "0.running_var", "0.num_batches_tracked"])
    layer(torch.randn(4, 2))
    mean = layer[0].running_mean.clone()
    kept.restore_nonfinite()
    layer(torch.full((4, 2), float("nan")))
    assert layer[0].running_mean.isnan().all()
    kept.restore_nonfinite()
    assert torch.equal(layer[0].running_mean, mean)


def listening(folder: Path) -> tuple[Listener, list[tuple[str, Mapping[str, Any]]]]:
    from autopipe.runtime.job import RunDirectory

    heard: list[tuple[str, Mapping[str, Any]]] = []
    take: Callable[[str, Mapping[str, Any]], None] = lambda kind, fields: heard.append((kind, fields))  # noqa: E731
    return Listener(RunDirectory(folder), take, 1), heard


def test_the_supervisor_names_the_step_and_the_checkpoint_before(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    listener, _ = listening(tmp_path)
    assert listener.nonfinite() is None
    for place, what in ((0, "the gradient of v (stage 0)"), (2, "its loss"), (1, "the gradient of w (stage 1)")):
        listener({"kind": "nonfinite", "step": 6, "what": what, "place": place, "policy": "stop"})
    error = listener.nonfinite()
    assert error is not None
    assert error.what == "step 7 is not finite: its loss"
    assert error.where.endswith("step-00000002")
    assert "--on-nonfinite skip" in error.remedy


def test_metrics_of_a_skipped_step_are_valid_json(tmp_path: Path) -> None:
    listener, heard = listening(tmp_path)
    listener({"kind": "nonfinite", "step": 0, "what": "its loss is nan", "policy": "skip"})
    listener({"kind": "step", "step": 0, "loss": float("nan"), "samples": 4, "time": 1.0})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["loss"] is None
    assert listener.skipped == [0]
    assert heard[0] == ("nonfinite", {"step": 0, "what": "its loss is nan", "skipped": True})

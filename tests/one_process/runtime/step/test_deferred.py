"""Deferred BatchNorm: the running statistics are those of the complete minibatch for every number of microbatches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.pipelines import BATCH, build, captured, minibatches, plan_for
from support.schedule_cases import compared, laid_out, recomputing
from torch import nn

from autopipe.runtime.step.deferred import DeferredStatistics
from autopipe.verify.check import compare


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d])
def test_statistics_equal_one_forward_over_the_minibatch(kind: type[nn.Module], momentum: float | None) -> None:
    shape = (12, 3) if kind is nn.BatchNorm1d else (12, 3, 4, 4)
    whole, cut = kind(3, momentum=momentum), kind(3, momentum=momentum)
    deferred = DeferredStatistics.of(cut)
    for step in range(3):
        data = torch.randn(shape, generator=torch.Generator().manual_seed(step)) * 2 + step
        whole(data)
        for part in data.tensor_split(5):
            cut(part)
        deferred.commit()
    assert torch.allclose(whole.running_mean, cut.running_mean, rtol=1e-5)
    assert torch.allclose(whole.running_var, cut.running_var, rtol=1e-5)
    assert whole.num_batches_tracked == cut.num_batches_tracked == 3
    whole.eval()
    cut.eval()
    assert torch.allclose(whole(data), cut(data), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("recompute", ["never", "stage", "block"])
def test_training_in_stages_defers_as_plain_training_does(num_stages: int, recompute: str, tmp_path: Path) -> None:
    subject = captured("resnet")
    plan = plan_for(subject, num_stages, "1f1b", 4, BATCH["resnet"])
    plan = replace(plan, stages=tuple(recomputing(stage, recompute, subject.capture.graph) for stage in plan.stages))
    pipeline = build(subject, plan, tmp_path, steps=3, deferred_batch_norm=True)
    items = minibatches(subject.workload, 3, BATCH["resnet"], last=5)
    assert compare(subject.workload, pipeline.run, pipeline.job, pipeline.context, items, draws=False).bitwise


def test_replicas_gather_the_statistics_of_the_complete_minibatch(tmp_path: Path) -> None:
    subject = captured("resnet")
    plan = plan_for(subject, 2, "1f1b", 4, BATCH["resnet"])
    stages = (replace(plan.stages[0], ranks=(0, 1)), replace(plan.stages[1], ranks=(2,)))
    pipeline = build(subject, replace(plan, num_ranks=3, stages=stages), tmp_path, steps=3, deferred_batch_norm=True)
    items = minibatches(subject.workload, 3, BATCH["resnet"])
    comparison = compare(subject.workload, pipeline.run, pipeline.job, pipeline.context, items, draws=False)
    assert comparison.equal, (comparison.max_relative_error, comparison.noise)
    assert any(d.name.endswith("running_var") and d.owner == -1 for d in comparison.differences)


@pytest.mark.parametrize("ranks", [((0, 1, 2),), ((0, 1), (2,))])
def test_replicas_gather_statistics_in_the_order_of_the_plain_loop(ranks: tuple[tuple[int, ...], ...], tmp_path: Path):
    subject = captured("resnet")
    plan = laid_out(plan_for(subject, len(ranks), "1f1b", 4, 12), "1f1b", ranks)
    comparison = compared(subject, plan, tmp_path, steps=3, last=9, deferred_batch_norm=True)
    assert comparison.promised and comparison.bitwise
    assert sum("running_var" in difference.name for difference in comparison.differences) > 3

"""Refusals before a run starts, with the numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.pipelines import BATCH, build, captured, minibatches, plan_for

from autopipe.errors import PlanError, RunError
from autopipe.runtime.context import RunContext


def test_a_batch_of_other_dimensions_or_another_dtype_names_the_tensor_and_both_shapes(tmp_path: Path) -> None:
    subject = captured("resnet")
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 2, BATCH["resnet"]), tmp_path)
    images, target = minibatches(subject.workload, 1, 4)[0]
    with pytest.raises(RunError, match=r"images is float32\[2, 1, 8\]; .* captured with float32\[s0, 1, 8, 8\]"):
        pipeline.train([(torch.zeros(4, 1, 8), target)])
    with pytest.raises(RunError, match=r"images is float64\[2, 1, 8, 8\]"):
        pipeline.train([(images.double(), target)])


def test_pipedream_refuses_a_parameter_that_two_stages_read_at_different_versions() -> None:
    subject = captured("gpt")
    plan = replace(plan_for(subject, 2, "1f1b", 4, BATCH["gpt"]), schedule="pipedream")
    with pytest.raises(PlanError, match=r"tokens\.weight tied: .* stage 0 reads version t - 1, stage 1 .* t - 0"):
        RunContext.of(plan, subject.capture.graph)
    RunContext.of(replace(plan, schedule_options={"vertical_sync": 1}), subject.capture.graph)
    RunContext.of(replace(plan, schedule="2bw"), subject.capture.graph)

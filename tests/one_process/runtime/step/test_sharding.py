"""The replicas of a stage divide its optimizer state: the weights are those of complete optimizers."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.pipelines import Captured, build, captured, minibatches, plan_for
from torch import nn

from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.plan import Plan
from autopipe.planning import PlanOptions, make_plan
from autopipe.planning.cost.memory import even_share
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.directory import directory_of
from autopipe.runtime.step.sharding import OptimizerShard, divide
from autopipe.runtime.transport.base import ThreadHub

SIZES = st.dictionaries(st.text("abc", min_size=1, max_size=4), st.integers(0, 1000), max_size=12)


@given(SIZES, st.integers(1, 6))
def test_every_name_has_one_rank_and_no_rank_has_more_than_planned(sizes: dict[str, int], count: int) -> None:
    parts = divide(sizes, count)
    assert sorted(name for part in parts for name in part) == sorted(sizes)
    most = max(sum(sizes[name] for name in part) for part in parts)
    total = sum(sizes.values())
    assert most <= min(total, even_share(total, max(sizes.values(), default=0), count))


def test_new_values_reach_all_replicas_to_the_bit() -> None:
    special = [-0.0, 0.0, math.nan, math.inf, -math.inf, 1e-45, 3.5]
    hub, shards, stages = ThreadHub(3), [], []
    for rank in range(3):
        stage = {
            "a": nn.Parameter(torch.full((7,), float(rank))),
            "half": nn.Parameter(torch.full((3,), float(rank), dtype=torch.bfloat16)),
            "image": nn.Parameter(torch.full((2, 3, 4, 5), float(rank)).to(memory_format=torch.channels_last)),
            "double": nn.Parameter(torch.full((1,), float(rank), dtype=torch.float64)),
            "frozen": nn.Parameter(torch.full((9,), 7.0), requires_grad=False),
        }
        stages.append(stage)
        shards.append(OptimizerShard(stage, (0, 1, 2), hub.transport(rank)))
    assert sorted(name for shard in shards for name in shard.own) == sorted(stages[0])
    expected = {}
    for shard in shards:
        for name, parameter in shard.own.items():
            with torch.no_grad():
                if name == "a":
                    parameter.copy_(torch.tensor(special))
                elif parameter.requires_grad:
                    parameter.normal_()
            expected[name] = parameter.detach().clone()
    # the parts of all ranks must be there before one of them waits
    for shard in shards[1:]:
        _start(shard)
    shards[0].exchange()
    for name, value in expected.items():
        got = stages[0][name].detach()
        assert got.stride() == value.stride()
        assert torch.equal(_bits(got), _bits(value)), name


def _start(shard: OptimizerShard) -> None:
    """Exchange without waiting for the sums."""
    transport: Any = shard._transport
    start = transport.start_all_reduce

    class Ignored:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def wait(self) -> torch.Tensor:
            return self.tensor

    def without_waiting(group: Any, tensor: torch.Tensor) -> Ignored:
        start(group, tensor)
        return Ignored(tensor.clone())

    transport.start_all_reduce = without_waiting
    shard.exchange()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def replicated(sample: str, schedule: str, ranks: int = 4) -> tuple[Captured, Plan]:
    subject = captured(sample)
    cluster = Cluster((Level("host", ranks, 1e10, 1e-6),), (ClusterDevice("cpu"),), "test")
    options = PlanOptions(num_ranks=ranks, batch_size=12, num_microbatches=6, schedule=schedule, may_replicate=True)
    plan = make_plan(subject.profile, cluster, options)
    assert max(stage.replicas for stage in plan.stages) > 1
    return subject, plan


@pytest.mark.parametrize(
    ("sample", "schedule", "clip"),
    [("gpt", "1f1b", 0.0), ("gpt", "gpipe", 0.5), ("resnet", "2bw", 0.5), ("unet", "pipedream", 0.0)],
)
def test_weights_are_those_of_a_complete_optimizer_on_every_replica(
    sample: str, schedule: str, clip: float, tmp_path: Path
) -> None:
    subject, plan = replicated(sample, schedule)
    items = minibatches(subject.workload, 3, 12)
    weights, slots = [], []
    for shard in (False, True):
        changed = dataclasses.replace(plan, shard_optimizer=shard)
        pipeline = build(subject, changed, tmp_path / str(shard), clip_grad_norm=clip)
        sessions = pipeline.train(items)
        weights.append(pipeline.weights(sessions))
        optimizers = [o for session in sessions for o in session.executor.stepper.optimizers.values() if o]
        slots.append([sum(t.numel() for s in o.state.values() for t in s.values()) for o in optimizers])
    complete, divided = weights
    assert all(torch.equal(complete[name], divided[name]) for name in complete)
    # every replica has all of its stage, or a part
    stages = [stage for stage in plan.stages for _ in stage.ranks]
    assert len(slots[0]) == len(stages)
    assert sum(slots[1]) < sum(slots[0]) / 2


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (True, True)])
def test_a_checkpoint_fits_plans_with_and_without_shards(before: bool, after: bool, tmp_path: Path) -> None:
    subject, plan = replicated("gpt", "1f1b")
    items = minibatches(subject.workload, 4, 12)
    expected = _trained(subject, dataclasses.replace(plan, shard_optimizer=before), tmp_path / "first", items)
    run = tmp_path / "resumed"
    pipeline = build(subject, dataclasses.replace(plan, shard_optimizer=before), run, save=True)
    pipeline.train(items[:2])
    manifest = Checkpoint(directory_of(pipeline.run.checkpoints, 2)).manifest
    stored = [file.training.state is not None for file in manifest.files]
    assert stored == [before or index == 0 for index in range(len(stored))]
    continued = build(subject, dataclasses.replace(plan, shard_optimizer=after), run, start_step=2)
    sessions = continued.train(items)
    weights = continued.weights(sessions)
    assert all(torch.equal(expected[name], weights[name]) for name in expected)


def test_a_divided_state_is_restored_at_another_number_of_stages(tmp_path: Path) -> None:
    subject, plan = replicated("gpt", "1f1b")
    items = minibatches(subject.workload, 4, 12)
    weights = []
    for shard in (False, True):
        run = tmp_path / str(shard)
        pipeline = build(subject, dataclasses.replace(plan, shard_optimizer=shard), run, save=True)
        pipeline.train(items[:2])
        continued = build(subject, plan_for(subject, 3, "1f1b", 6, 12), run, start_step=2)
        weights.append(continued.weights(continued.train(items)))
    complete, divided = weights
    assert all(torch.equal(complete[name], divided[name]) for name in complete)


def _trained(subject: Captured, plan: Plan, folder: Path, items: list[Any]) -> dict[str, Any]:
    pipeline = build(subject, plan, folder)
    return pipeline.weights(pipeline.train(items))

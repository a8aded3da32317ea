"""Replicas with several stages start the sums of their gradients in one order, whatever each of them runs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from support.pipelines import build, captured, minibatches
from support.schedule_cases import Case

from autopipe.ir.schedule import Instruction, Op, ScheduleSpec
from autopipe.runtime.program import overlapping_backwards
from autopipe.schedules import make


def order_of_sums(row: list[Instruction], late: set[int]) -> list[tuple[int, int]]:
    """Return the order in which a rank starts its sums: those of ``late`` stages at their R, others where they may."""
    overlapping = overlapping_backwards(row)
    started: dict[tuple[int, int], None] = {}
    for i in row:
        if i.op == Op.REDUCE or (i in overlapping and i.stage not in late):
            started.setdefault((i.minibatch, i.stage))
    return list(started)


@pytest.mark.parametrize("name", ["interleaved", "gpipe", "zero-bubble"])
@pytest.mark.parametrize(("n", "v", "d"), [(2, 2, 2), (1, 3, 2), (3, 2, 2), (2, 3, 3)])
def test_sums_start_in_one_order_with_fewer_microbatches_and_parameters_without_gradients(
    name: str, n: int, v: int, d: int
) -> None:
    # a parameter without a gradient delays a sum to its R; on another replica it may start in the backward
    groups = [tuple(range(g * d, g * d + d)) for g in range(n)]
    m = 4 * n * d
    schedule = make(name, ScheduleSpec(tuple(groups[s % n] for s in range(n * v)), m, 2))
    overlapped = 0
    for group, left in itertools.product(groups, range(1, m + 1)):
        orders = set()
        for rank in group:
            row = [i for i in schedule.rows[rank] if i.microbatch < left]  # a ragged last minibatch
            overlapped += len(overlapping_backwards(row))
            stages = {i.stage for i in row}
            orders |= {tuple(order_of_sums(row, late)) for late in (set(), stages, *({stage} for stage in stages))}
        assert len(orders) == 1
    assert bool(overlapped) == (name != "zero-bubble")  # a backward in halves has no last part that sums could follow


def test_every_stage_of_a_rank_sums_during_its_own_last_backward() -> None:
    layout = ((0, 1), (2, 3)) * 2
    row = make("interleaved", ScheduleSpec(layout, 8)).rows[0]
    assert {str(i) for i in overlapping_backwards(row)} == {"2B6@0", "0B6@0"}


def test_a_run_continues_from_a_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    # seven microbatches over two replicas: each has three or four, in turn
    subject = captured("gpt")
    case = Case("interleaved", "gpt", (2, 2), "p", loops=2)
    plan = case.plan(subject)
    items = minibatches(subject.workload, 5, plan.batch_size, last=3)
    whole = build(subject, plan, tmp_path / "whole", clip_grad_norm=0.1)
    expected = whole.weights(whole.train(items))
    parts = build(subject, plan, tmp_path / "parts", clip_grad_norm=0.1, save=True)
    parts.train(items, steps=2)
    ours = parts.weights(parts.train(items))
    assert ours.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(ours[name], expected[name])] == []

"""Every schedule trains as docs/semantics.md defines, in samples of layouts, microbatches, recompute and models."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.oracle import by_owner
from support.oracle import train as plain
from support.pipelines import ARGUMENTS, build, captured, minibatches
from support.samples import SAMPLES
from support.schedule_cases import BATCH, LAST, SCHEDULES, STEPS, Case, cases, compared, hold

QUIET = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


def sampled(schedule: str, count: int) -> dict[str, int]:
    """Assert the promises of a sample of a schedule's cases; return the number of each outcome."""
    counts: dict[str, int] = {}
    seen: set[Case] = set()

    @settings(max_examples=count, **QUIET)
    @given(st.sampled_from(list(cases(schedule))))
    def one(case: Case) -> None:
        if case in seen:
            return
        seen.add(case)
        with tempfile.TemporaryDirectory() as folder:
            kind = hold(case, Path(folder))
        counts[kind] = counts.get(kind, 0) + 1

    one()
    return counts


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_few_cases_of_every_schedule_are_as_equal_as_promised(schedule: str) -> None:
    assert sampled(schedule, 9).get("plain", 0) >= 1


@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_replicas_average_batch_norm_while_other_microbatches_are_in_flight(schedule: str, tmp_path: Path) -> None:
    # autograd has saved the running statistics, so an average must not be written into their memory
    assert hold(Case(schedule, "resnet", (2, 1), "8"), tmp_path) == "reordered"


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2)])
def test_a_large_tied_parameter_is_summed_at_every_replica_of_its_owner(
    replicas: tuple[int, ...], tmp_path: Path
) -> None:
    # every replica of the owner must receive the gradient of the copy, or the replicas diverge
    subject = captured("gpt")
    plan = Case("1f1b", "gpt", replicas, "2p").plan(subject)
    ties = tuple(replace(tie, exact=False) for tie in plan.ties)
    assert ties
    comparison = compared(subject, replace(plan, ties=ties), tmp_path, steps=2)
    assert comparison.promised and comparison.bitwise, comparison.max_relative_error
    assert len(comparison.orders) == 2 and 0 < comparison.order_error < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_cases_of_every_schedule_are_as_equal_as_promised(schedule: str) -> None:
    assert sampled(schedule, 60).get("plain", 0) >= 10


STALE = [
    Case("2bw", "resnet", (1, 1, 1), "p"),
    Case("2bw", "unet", (1, 1, 1, 1), "p + 1"),
    Case("2bw", "gpt", (1, 1), "2p", recompute=("stage",)),
    Case("pipedream", "resnet", (1, 1, 1, 1), "1"),
    Case("pipedream", "unet", (1, 1, 1), "2", recompute=("stage", "never")),
    Case("pipedream", "resnet", (1, 1, 1), "1", vertical_sync=True),
    Case("pipedream", "unet", (1, 1, 1, 1), "2", vertical_sync=True),
    Case("pipedream", "gpt", (1, 1, 1), "1", vertical_sync=True),
]


def staleness_by_hand(case: Case) -> list[int]:
    """Return the staleness of docs/semantics.md for one rank per stage: p - 1 - s microbatches are sent ahead."""
    p = len(case.replicas)
    if case.schedule == "2bw":
        return [1] * p
    own = [-(-(p - 1 - s) // case.m) for s in range(p)]
    return [max(own)] * p if case.vertical_sync else own


@pytest.mark.parametrize("case", STALE, ids=lambda c: f"{c.schedule}-{c.model}-{len(c.replicas)}-m{c.m}")
def test_weights_of_stale_schedules_equal_the_oracle_bit_for_bit(case: Case, tmp_path: Path) -> None:
    subject = captured(case.model)
    plan = case.plan(subject)
    pipeline = build(subject, plan, tmp_path)
    items = minibatches(subject.workload, STEPS + 2, BATCH, last=LAST)
    sessions = pipeline.train(items)
    deltas = staleness_by_hand(case)
    assert max(deltas) > 0
    losses, model, _ = plain(
        SAMPLES / f"{case.model}.py",
        items,
        case.m,
        staleness=by_owner([stage.parameters for stage in plan.stages], deltas),
        arguments=numbers(case.model),
    )
    ours = pipeline.weights(sessions)
    assert [sessions[0].executor.stepper.losses[step] for step in range(len(items))] == losses
    for name, parameter in model.named_parameters():
        assert torch.equal(ours[name], parameter), name
    for name, buffer in model.named_buffers():
        assert torch.equal(ours.get(name, buffer), buffer), name


def numbers(model: str) -> dict[str, float]:
    return {name: float(text) if "." in text else int(text) for name, text in ARGUMENTS[model].items()}

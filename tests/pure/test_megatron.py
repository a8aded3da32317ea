"""The synthesised profiles of Megatron-LM's models against the figures of the paper."""

from __future__ import annotations

import math

import pytest

from autopipe.planning.cost.predict import predict
from benchmarks.megatron import chosen, published, sizes_of
from benchmarks.published.megatron import ROWS, SIZES, Row, cluster_of, profile_of


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.parameters:g}B")
def test_parameters_and_operations_are_those_of_the_paper(row: Row) -> None:
    profile = profile_of(row, 1)
    numbers = sum(spec.num_bytes({}) // 4 for spec in profile.graph.parameters.values())
    assert numbers / 1e9 == pytest.approx(row.parameters, abs=0.051)
    for size, measurement in zip(SIZES, profile.measurements, strict=True):
        recomputed = sum(work.forward.flops for name, work in measurement.work.items() if name != "head")
        flops = row.batch / size * (measurement.model_flops + recomputed)
        assert flops == pytest.approx(row.flops, rel=1e-3)


@pytest.mark.parametrize("t", [2, 4, 8])
def test_a_team_shares_out_the_operations_and_sums_over_its_links(t: int) -> None:
    row = ROWS[3]
    alone, member = profile_of(row, 1).measurements[0], profile_of(row, t).measurements[0]
    assert t * member.model_flops == pytest.approx(alone.model_flops, rel=1e-6)
    ring = 2 * (t - 1) / t * 2 * 2048 * row.width / 150e9 + 2 * (t - 1) * 10e-6
    cost, products = member.costs["mlp_0"], 16 * 2048 * row.width**2 / t / (0.6 * 312e12)
    assert cost.forward_seconds > ring + products
    assert cost.forward_seconds < alone.costs["mlp_0"].forward_seconds / t + ring + 2e-4


def test_the_published_configuration_is_planned_as_it_is() -> None:
    for row in ROWS[4:6]:
        plan = published(row, profile_of(row, row.team))
        assert sizes_of(plan, row.team) == row.sizes
        assert math.prod(row.sizes) == row.gpus
        assert plan.microbatch_size == row.microbatch
        assert len(plan.stages) == row.depth * row.stages_per_rank
        assert {stage.recompute for stage in plan.stages} == {"block"}


def test_the_choice_is_at_least_as_fast_as_the_published_configuration() -> None:
    row = ROWS[1]
    profiles = {t: profile_of(row, t) for t in (1, 2)}
    plan, t, seconds = chosen(row, profiles, "block")
    theirs = published(row, profiles[row.team])
    assert seconds <= predict(theirs, profiles[row.team], cluster_of(row, row.team)).step_seconds
    assert seconds == predict(plan, profiles[t], cluster_of(row, t)).step_seconds

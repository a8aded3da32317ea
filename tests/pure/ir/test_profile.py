"""Profiles: values out of range are refused, and costs are interpolated between measured sizes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from support.planning_cases import chain

from autopipe.ir.profile import Device, Measurement, NodeCost, NodeWork, PassWork, Profile, WorkloadSpec

PROFILE = chain(2)
FIRST, SECOND = (node.name for node in PROFILE.graph.nodes)
SPEC = WorkloadSpec("net.py", arguments={}, hooks={}, inputs=(), seed=0)
COST = NodeCost(1.0, 2.0, 4, 8, 16)


def measured(size: int, factor: float = 1.0, **fields: Any) -> Measurement:
    scaled = NodeCost(factor, 2 * factor, round(4 * factor), round(8 * factor), round(16 * factor))
    return Measurement(size, {FIRST: scaled, SECOND: scaled}, **fields)


@pytest.mark.parametrize(
    ("value", "fields", "message"),
    [
        (SPEC, {"precision": "fp8"}, "unknown precision 'fp8'; known: fp32, bf16, fp16"),
        (SPEC, {"seed": 2**63}, "the seed must fit in 64 bits, and is 9223372036854775808"),
        (SPEC, {"lr": -0.1}, "the learning rate must be finite and at least 0, and is -0.1"),
        (SPEC, {"lr": math.inf}, "the learning rate must be finite and at least 0, and is inf"),
        (COST, {"forward_seconds": -1.0}, "costs must be at least 0, and at most 1e[+]09 s"),
        (COST, {"backward_seconds": 2e9}, "costs must be at least 0, and at most 1e[+]09 s"),
        (COST, {"saved_bytes": -1}, "costs must be at least 0"),
        (COST, {"workspace_bytes": 2**61}, "costs must be at least 0"),
        (PassWork(), {"flops": -1}, "operations and bytes must be at least 0"),
        (measured(1), {"microbatch_size": 0}, "the microbatch size must be at least 1 and the spread at least 0"),
        (measured(1), {"spread": -0.1}, "the microbatch size must be at least 1 and the spread at least 0"),
        (Device("cpu", "c", 0), {"kind": "tpu"}, "unknown kind of device 'tpu'; known: cpu, cuda, gpu, none"),
        (Device("cpu", "c", 0), {"memory_bytes": -1}, "c: memory must be at least 0 bytes and threads at least 1"),
        (Device("cpu", "c", 0), {"threads": 0}, "c: memory must be at least 0 bytes and threads at least 1"),
        (Device("cuda", "c", 0), {"per_host": -1}, "c: the GPUs of a host must be at least 0, and are -1"),
        (PROFILE, {"measurements": ()}, "a profile needs at least one measurement"),
        (
            PROFILE,
            {"measurements": (Measurement(1, {FIRST: COST}),)},
            f"microbatch size 1: the costs do not match the nodes of the graph; '{SECOND}' is in only one of them",
        ),
        (
            PROFILE,
            {"measurements": (measured(1, keepers={FIRST: "gone"}),)},
            "microbatch size 1: keepers names 'gone', which is not a node of the graph",
        ),
        (
            PROFILE,
            {"measurements": (measured(1, work={"gone": NodeWork()}),)},
            "microbatch size 1: work names 'gone', which is not a node of the graph",
        ),
        (
            PROFILE,
            {"measurements": (measured(1, casts={"gone": 2}),)},
            "microbatch size 1: casts must name parameters of the graph with their bytes, and are {'gone': 2}",
        ),
        (
            PROFILE,
            {"measurements": (measured(2), measured(1))},
            r"microbatch sizes must be in ascending order, and are \[2, 1\]",
        ),
        (PROFILE, {"optimizer_seconds_per_byte": -1.0}, "the optimizer's costs are out of range"),
        (PROFILE, {"optimizer_bytes_per_byte": -1.0}, "the optimizer's costs are out of range"),
        (PROFILE, {"batch_size": -1}, "batch_size must be from 0 to 2[*][*]31 - 1, and is -1"),
    ],
)
def test_a_value_out_of_range_is_refused(value: Any, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(value, **fields)


def with_sizes(*measurements: Measurement) -> Profile:
    return dataclasses.replace(PROFILE, measurements=measurements)


def test_a_measured_size_has_its_costs() -> None:
    small, large = measured(2, work={FIRST: NodeWork(PassWork(flops=7))}), measured(4, 3.0)
    assert with_sizes(small, large).at(2) is small


def test_a_size_between_two_measured_ones_is_interpolated() -> None:
    profile = with_sizes(measured(2, 1.0, spread=0.1), measured(4, 3.0, spread=0.3), measured(100, 1e3))
    between = profile.at(3)
    assert between.costs[FIRST] == NodeCost(2.0, 4.0, 8, 16, 32)
    assert (between.spread, between.work) == (0.3, {})
    assert profile.at(6).costs[FIRST].forward_seconds == pytest.approx(5.0)
    assert profile.at(1).costs[FIRST].forward_seconds == 0.0  # the line is below 0 there


def test_costs_of_a_single_size_are_proportional() -> None:
    assert with_sizes(measured(2)).at(6).costs[SECOND] == NodeCost(3.0, 6.0, 12, 24, 48)


def test_only_trained_parameters_count_as_trained_bytes() -> None:
    frozen = {
        name: dataclasses.replace(spec, requires_grad=index > 0)
        for index, (name, spec) in enumerate(PROFILE.graph.parameters.items())
    }
    graph = dataclasses.replace(PROFILE.graph, parameters=frozen)
    assert dataclasses.replace(PROFILE, graph=graph).trained_bytes == PROFILE.trained_bytes / 2


def test_a_hook_is_replaced_in_a_copy() -> None:
    assert SPEC.with_hook("data", "other.py:data").hooks == {"data": "other.py:data"}
    assert SPEC.hooks == {}

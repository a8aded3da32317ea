"""Which cases of a table run with every change."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

PRODUCTS = (
    "many_processes/script/test_forwards.py",
    "many_processes/script/test_ways.py",
    "one_process/commands/plain/test_plain.py",
    "one_process/generate/test_teams.py",
    "one_process/runtime/after_step/test_after_step.py",
    "one_process/runtime/step/test_frozen_ties.py",
    "one_process/runtime/step/test_shares.py",
    "one_process/runtime/test_recompute_buffers.py",
    "one_process/runtime/training_state/test_groups.py",
    "one_process/runtime/training_state/test_resume.py",
    "one_process/runtime/transport/test_late_wire.py",
    "one_process/runtime/transport/test_nccl_model.py",
    "one_process/runtime/transport/test_nccl_teams.py",
    "one_process/trace/test_opaque.py",
    "one_process/trace/test_package_state.py",
    "one_process/trace/test_python_state.py",
    "one_process/verify/test_optimizer_probe.py",
    "pure/planning/cost/test_spilled.py",
    "pure/planning/test_equal_replicas.py",
    "pure/planning/test_replicated.py",
)
"""Files whose tables are products, or long: a third of each runs with every change, all of it in `make test-all`."""
_LONG = 6


def leave_two_thirds(items: Iterable[pytest.Item]) -> None:
    """Mark as slow two thirds of the cases of the long tables in ``PRODUCTS``."""
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        file, _, function = item.nodeid.partition("[")[0].partition("::")
        if file.removeprefix("tests/") in PRODUCTS:
            tables.setdefault(f"{file} {function}", []).append(item)
    for table in tables.values():
        for index, item in enumerate(table):
            if len(table) >= _LONG and index % 3:
                item.add_marker(pytest.mark.slow)


def mostly_slow(cases: Iterable[Any], sooner: Collection[Any]) -> list[Any]:
    """Return the cases of a ``parametrize``: those not in ``sooner`` are slow. A tuple has several arguments."""
    return [
        case
        if case in sooner
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]

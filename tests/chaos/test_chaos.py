"""A few of the single faults of ``make chaos``, always the same ones, and the properties of the cases themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.chaos.campaign import table, written
from support.chaos.case import SCHEDULES, STEPS, Case, walk
from support.chaos.judge import happens, prepared, weights
from support.chaos.scene import Scene, can_mount

BASE = Case(0, 0, "SIGKILL", "step", 1, 5, 0.0, 2, "1f1b", 2, 0, 0)
CASES = [
    replace(BASE, kind="SIGKILL", moment="save", restarts=1),
    replace(BASE, kind="supervisor", moment="start"),
    replace(BASE, kind="exception", step=9),
    replace(BASE, kind="disk full", moment="step"),
]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("chaos") / "undisturbed", BASE.ranks, BASE.schedule)


@pytest.fixture(scope="module")
def undisturbed(ground: Path) -> dict[str, torch.Tensor]:
    return weights(ground / "run")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_is_reported_and_the_run_continues_to_equal_weights(
    ground: Path, undisturbed: dict[str, torch.Tensor], tmp_path: Path, case: Case
) -> None:
    if case.kind == "disk full" and not can_mount():
        pytest.skip("nothing can be mounted here")
    folder = tmp_path / "disturbed"
    folder.mkdir()
    outcome = happens(Scene(folder, case, ground), undisturbed)
    assert outcome.passed, outcome.why


def test_a_seed_is_always_the_same_case_and_every_case_has_a_seed() -> None:
    for hosts in (False, True):
        cases = [Case.at_random(seed, hosts=hosts) for seed in range(500)]
        assert cases == [Case.at_random(seed, hosts=hosts) for seed in range(500)]
        assert all(0 <= case.whom < case.ranks and case.step < STEPS for case in cases)
        assert {case.moment for case in cases} >= {"start", "step", "save"}
        drawn = [(case.kind, case.moment) for case in cases]
        assert drawn[: len(walk(hosts))] == walk(hosts)
        assert set(drawn) == set(walk(hosts))
    assert len(walk(False)) <= 100 and len(walk(True)) <= 30  # what make chaos does
    assert {Case.at_random(seed).schedule for seed in range(100)} == set(SCHEDULES)


def test_the_report_names_the_properties_that_failed() -> None:
    from support.chaos.judge import Outcome

    bad, good = Outcome(replace(BASE, seed=7)), Outcome(BASE)
    bad.judge("blame", passed=False, why="rank 0")
    good.judge("blame", passed=True)
    assert "| blame | 1 | 2 |" in table([bad, good])
    assert any(line.startswith("| 7 |") and "**blame**" in line for line in table([bad, good]))
    assert "1 of 2 as they should be" in written([bad, good], [], [], 1.0)

"""A few of the single faults of ``make chaos`` on two hosts, always the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.chaos.campaign import two_hosts, why_not
from support.chaos.case import Case
from support.chaos.judge import happens, prepared, weights
from support.chaos.scene import Scene

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts")]
BASE = Case(0, 0, "SIGKILL", "save", 3, 5, 0.0, 4, "1f1b", 2, 0, 0, hosts=True)
CASES = [BASE, replace(BASE, kind="link", moment="step", whom=1), replace(BASE, kind="peer", whom=0, restarts=1)]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    with two_hosts(tmp_path_factory.mktemp("hosts") / "ssh") as two:
        yield two


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("chaos") / "undisturbed", BASE.ranks, BASE.schedule)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_is_reported_with_its_host(hosts: object, ground: Path, tmp_path: Path, case: Case) -> None:
    folder = tmp_path / "disturbed"
    folder.mkdir()
    outcome = happens(Scene(folder, case, ground, hosts), weights(ground / "run"))
    assert outcome.passed, outcome.why

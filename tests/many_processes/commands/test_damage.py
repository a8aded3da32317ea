"""Every damage to the staged run is seen by check, the start of train, an audit, a resumed run or `run --check`."""

from __future__ import annotations

import functools
import importlib
import os
from pathlib import Path

import pytest
from support.damage.damages import DAMAGES
from support.damage.pairs import EQUAL_SOONER, PAIRS, SOONER, SWITCHED_SOONER
from support.damage.running import Bench
from support.damage.settings import SETTINGS
from support.damage.switched import COMPARISONS
from support.slow import mostly_slow

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    base = tmp_path_factory.getbasetemp()
    return Bench((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "damage")


@pytest.mark.parametrize(("setting", "damage"), mostly_slow(PAIRS, SOONER))
def test_damage_is_seen(bench: Bench, setting: str, damage: str, tmp_path: Path) -> None:
    outcome = bench.run(setting, [damage], tmp_path)
    assert damage in outcome.ran, f"the damage has no effect in this setting\n{outcome.text}"
    assert outcome.seen, outcome.text


@pytest.mark.parametrize("setting", mostly_slow(SETTINGS, EQUAL_SOONER))
def test_undamaged_training_is_equal(bench: Bench, setting: str, tmp_path: Path) -> None:
    outcome = bench.run(setting, [], tmp_path)
    assert outcome.code == SETTINGS[setting].code, outcome.text


@pytest.mark.parametrize("comparison", mostly_slow(COMPARISONS, SWITCHED_SOONER))
def test_a_pair_fails_without_the_comparison_that_sees_it(bench: Bench, comparison: str, tmp_path: Path) -> None:
    setting, damage = COMPARISONS[comparison]
    outcome = bench.run(setting, [damage, comparison], tmp_path)
    assert outcome.ran == {damage, comparison}, outcome.text
    assert outcome.code == 0, outcome.text


def test_the_table_is_complete() -> None:
    assert len(PAIRS) >= 100 and len(set(PAIRS)) == len(PAIRS)
    assert {damage for _, damage in PAIRS} | set(COMPARISONS) <= set(DAMAGES)
    assert {setting for setting, _ in PAIRS} <= set(SETTINGS)
    assert set(COMPARISONS.values()) <= set(PAIRS)
    assert len(SOONER) >= 20 and set(SOONER) <= set(PAIRS)


@pytest.mark.parametrize("name", DAMAGES)
def test_what_a_damage_replaces_exists(name: str) -> None:
    for damage in DAMAGES[name]:
        assert callable(functools.reduce(getattr, damage.path.split("."), importlib.import_module(damage.module)))

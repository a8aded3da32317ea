"""The table of ways to use parameters, gradients and optimizer state: none differs in silence."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support.script_runs import SCRIPTS, Ended, by_python, in_stages

NOT_WAYS = {"loss_of", "plain_step", "train"}


def functions(name: str) -> list[str]:
    tree = ast.parse((SCRIPTS / name).read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name not in NOT_WAYS]


def sections(text: str, names: list[str]) -> dict[str, list[str]]:
    """Return the lines after each name."""
    result: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line in names:
            result[line] = []
        elif result:
            result[list(result)[-1]].append(line)
    return result


FILES = tuple(f"ways/ways_{kind}.py" for kind in ("parameters", "gradients", "optimizers", "outputs"))
WAYS = {way: name for name in FILES for way in functions(name)}
REFUSED = functions("ways/refused_ways.py")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return {name: by_python(SCRIPTS / name, folder=tmp_path_factory.mktemp("plain")) for name in FILES}


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return {name: in_stages(SCRIPTS / name, folder=tmp_path_factory.mktemp("staged")) for name in FILES}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return in_stages(SCRIPTS / "ways/refused_ways.py", folder=tmp_path_factory.mktemp("refused"))


def test_the_table_is_long_enough() -> None:
    assert len(WAYS) >= 70
    assert len(REFUSED) >= 30


@pytest.mark.parametrize("way", WAYS)
def test_a_way_gives_the_numbers_of_python(way: str, plain: dict[str, Ended], staged: dict[str, Ended]) -> None:
    file = WAYS[way]
    assert plain[file].code == 0, plain[file].errors
    expected, got = (sections(ended[file].output, list(WAYS)) for ended in (plain, staged))
    assert len(expected[way]) >= 4
    assert got.get(way) == expected[way], staged[file].errors[-2000:]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(("ranks", "replicas"), [(3, 1), (2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_the_ways_give_the_numbers_of_python_on_other_ranks(
    file: str, ranks: int, replicas: int, plain: dict[str, Ended], tmp_path: Path
) -> None:
    other = in_stages(SCRIPTS / file, folder=tmp_path, stages=ranks, options=("--replicas", str(replicas)))
    assert other.code == 0, other.errors
    assert other.output == plain[file].output


@pytest.mark.parametrize("way", REFUSED)
def test_a_way_is_refused_with_its_line(way: str, refused: Ended) -> None:
    # torch itself refuses a gradient of another type
    kind = "RuntimeError" if way == "grad_of_another_type" else "refused"
    assert f"{way}: {kind}" in refused.errors.splitlines()


def test_a_refusal_changes_nothing_and_is_not_forgotten(refused: Ended, tmp_path: Path) -> None:
    expected = by_python(SCRIPTS / "ways/refused_ways.py", "--plain", folder=tmp_path)
    assert refused.output == expected.output
    assert refused.code == 1
    assert "the script caught this error and went on" in refused.errors

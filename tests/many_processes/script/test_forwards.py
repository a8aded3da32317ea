"""What a forward does besides computing, and what it reads besides its arguments: none differs in silence."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support.script_runs import SCRIPTS, Ended, by_python, in_stages

FILES = "effects.py", "keeps.py", "reads.py", "reads_data.py", "reads_objects.py"
FORWARDS = SCRIPTS / "forwards"
REFUSED = {
    "binds_a_global": "keeps a tensor in another place than an attribute of the model",
    "changes_a_tensor": "changes a tensor in place that is neither parameter nor buffer",
    "changes_a_tensor_by_a_result": "changes a tensor in place that is neither parameter nor buffer",
    "saves_a_tensor": "calls torch.serialization.save",
    "draws_from_its_own_generator": "an argument of type Generator",
    "seeds": "calls torch.random.manual_seed",
    "seeds_for_a_moment": "calls torch.random.fork_rng",
    "draws_for_a_moment": "calls torch.random.fork_rng",
    "keeps_a_random_mask": "reads an output of an earlier call",
    "uses_a_cached_function_that_draws": "keeps a tensor in another place than an attribute of the model",
    "changes_a_parameter": "changes parameter b.weight in place",
    "another_forward": "which only the script has",
    "another_method_of_the_class": "which only the script has",
}


def ways(name: str) -> list[str]:
    tree = ast.parse((FORWARDS / name).read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(getattr(part, "name", "") == "inside" for part in node.body)
    ]


def sections(text: str) -> dict[str, list[str]]:
    """Return the indented lines after each name."""
    result: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("  "):
            result[list(result)[-1]].append(line)
        else:
            result[line] = []
    return result


WAYS = {way: name for name in FILES for way in ways(name)}
EQUAL = [way for way in WAYS if way not in REFUSED]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return {name: by_python(FORWARDS / name, folder=tmp_path_factory.mktemp("plain")) for name in FILES}


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return {name: in_stages(FORWARDS / name, folder=tmp_path_factory.mktemp("staged")) for name in FILES}


def test_the_table_is_long_enough_and_has_every_refusal() -> None:
    assert REFUSED.keys() <= WAYS.keys()
    assert len(WAYS) >= 90
    assert len(EQUAL) >= 80


@pytest.mark.parametrize("way", EQUAL)
def test_a_forward_gives_the_numbers_of_python(way: str, plain: dict[str, Ended], staged: dict[str, Ended]) -> None:
    file = WAYS[way]
    assert plain[file].code == 0, plain[file].errors
    expected, got = sections(plain[file].output)[way], sections(staged[file].output).get(way)
    assert len(expected) >= 5
    assert got == expected, [line for line in staged[file].errors.splitlines() if line.startswith(way)]


@pytest.mark.parametrize("way", REFUSED)
def test_a_forward_is_refused_with_its_line(way: str, staged: dict[str, Ended]) -> None:
    ended = staged[WAYS[way]]
    assert way not in sections(ended.output)
    (line,) = [line for line in ended.errors.splitlines() if line.startswith(f"{way}: ")]
    assert line.startswith(f"{way}: refused: autopipe run: this call of the model cannot run in stages: ")
    assert REFUSED[way] in line
    assert ".py:" in line.rpartition("[")[2]


@pytest.mark.parametrize("file", FILES)
def test_the_forwards_do_the_same_in_three_stages(file: str, staged: dict[str, Ended], tmp_path: Path) -> None:
    three = in_stages(FORWARDS / file, folder=tmp_path, stages=3)
    assert three.code == staged[file].code
    assert three.output == staged[file].output

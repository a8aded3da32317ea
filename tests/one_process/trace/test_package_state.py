"""State of installed packages that changes a call is seen; what only logs is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.guarded import first_difference, graph_of, in_child
from support.models.surveyed import surveyed
from support.packages.cases import CHANGING, HARMLESS, written
from support.packages.values import ITERATORS

from autopipe.trace.tape.survey import NOTHING, Survey

LATE = {
    "window of a rounded fraction": 449,
    "a float that a function of C compares": 499,
    "an integer that a function of C divides": 498,
    "a float that is rounded": 1994,
    "window of a float": 299,
    "window of a numpy integer": 300,
    "window of a length": 300,
    "window of a fraction": 300,
    "table of a few hundred steps": 689,
    "loss that fails later": 299,
    "date": 365,
    "quotient compared with a number": 299,
    "step that saves a file and changes the loss": 500,
}
"""The minibatch of which a call differs, later than a survey looks."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder whose site-packages can be imported, for one test."""
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    yield tmp_path
    for name in list(sys.modules):
        if name.partition(".")[0] in ("counting", "counting_base"):
            del sys.modules[name]


def survey_of(name: str, folder: Path) -> Survey:
    return surveyed(written(name, folder), folder / "site-packages")


@pytest.mark.parametrize("name", [name for name in CHANGING if name not in LATE])
def test_state_of_a_package_that_changes_a_call_is_seen(name: str, tmp_path: Path) -> None:
    survey = survey_of(name, tmp_path)
    assert survey.first is not None and "does not do the same for each batch" in survey.first.text


@pytest.mark.parametrize("name", LATE)
def test_a_call_that_changes_after_hundreds_of_steps_ends_the_run_there(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(name, folder)
    monkeypatch.chdir(folder)
    assert surveyed(path, folder / "site-packages") == NOTHING
    kind, graph = in_child(graph_of, path)
    assert kind == "ok"
    kind, (place, text, _) = in_child(first_difference, path, graph, 2000, 1)
    assert kind == "ok" and place == (LATE[name], 0) and "operator.mul(%l_2, 1.1)" in text


@pytest.mark.parametrize("name", list(HARMLESS))
def test_state_of_a_package_that_changes_no_call_is_nothing(name: str, tmp_path: Path) -> None:
    assert survey_of(name, tmp_path) == NOTHING


@pytest.mark.parametrize("name", list(ITERATORS))
def test_an_iterator_of_a_package_is_seen(name: str, tmp_path: Path) -> None:
    assert survey_of(name, tmp_path).first is not None


def test_later_steps_write_no_files_and_no_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    survey_of("files and output at a later step", tmp_path)
    assert not (tmp_path / "NEVER").exists()
    assert (tmp_path / "site-packages" / "counting" / "util.py").exists()
    assert "NEVER" not in "".join(capfd.readouterr())


def test_a_number_of_a_package_travels_or_is_refused_by_name(run: Any, folder: Path) -> None:
    path = written("base class of a temporary object", folder)
    words = ("check", path.name, "--gpus", "2", "--device", "cpu")
    done = run(*words)
    assert done.exit_code == 0 and "these numbers travel with it" in " ".join(done.stderr.split())
    path.write_text(path.read_text() + "\ndef split(batch, parts):\n    return [batch] * parts\n")
    done = run(*words)
    assert done.exit_code == 1
    assert "does not do the same for each batch" in " ".join(done.stderr.split())
    assert "the model is not one fixed graph" in " ".join(done.stderr.split())
    assert "the split hook runs in the ranks" in " ".join(done.stderr.split())

"""The lines of ``autopipe run`` on standard error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopipe.script.notes import Notes

Lines = Any


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    """Return a function that returns the lines that were written since its last call."""
    return lambda: capsys.readouterr().err.replace("autopipe run: ", "").splitlines()


@pytest.mark.parametrize("names", [("build_model",), ("data", "loss"), ("build_model", "data", "loss")])
def test_a_model_file_that_runs_as_a_script_is_recognized(names: tuple[str, ...], lines: Lines) -> None:
    Notes().untrained(Path("an adapter.py"), dict.fromkeys(names, print), 3)
    assert lines() == [
        "no model was trained: nothing ran in stages",
        f"an adapter.py defines {' and '.join(names)}, as a model file does; try: "
        "autopipe train 'an adapter.py' --gpus 3",
    ]


def test_another_script_that_trains_nothing_is_no_model_file(lines: Lines) -> None:
    Notes().untrained(Path("train.py"), {"data": [1], "loss": 1.0, "optimizer": print}, 2)
    assert lines() == ["no model was trained: nothing ran in stages"]

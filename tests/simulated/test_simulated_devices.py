"""The simulated devices behave as GPUs do, in both builds of their library."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support.simulated.library import CUDA, PRIVATE, environment, needed
from support.warm.programs import TORCH, run_warm

SCRIPT = Path(__file__).parents[1] / "support" / "simulated" / "trials.py"
TRIALS = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and not node.decorator_list
]


@pytest.fixture(autouse=True)
def _needed() -> None:
    needed()


@pytest.mark.parametrize("library", [CUDA, PRIVATE])
@pytest.mark.parametrize("trial", TRIALS)
def test_a_trial_holds(trial: str, library: str, tmp_path: Path) -> None:
    done = run_warm(str(SCRIPT), trial, cwd=tmp_path, env=environment(library), modules=TORCH)
    assert done.returncode == 0, done.stderr

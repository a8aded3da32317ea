"""Compiled code and plain code make the same plans, with numba, without it, and for every hash seed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autopipe.planning.search import compiled

CASES = "400"


def printed_plans(**environment: str) -> str:
    folder = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "support.compiled_cases", CASES],
        cwd=folder,
        env={**os.environ, "PYTHONHASHSEED": "0", **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_plans_without_numba_are_the_same():
    plans = printed_plans(AUTOPIPE_NO_NUMBA="1")
    assert plans == printed_plans(PYTHONHASHSEED="7")
    assert len(plans) > 100_000


def test_without_a_folder_for_the_cache_code_is_compiled_in_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    options = []

    def njit(**given: Any) -> Callable[[Any], Any]:
        options.append(given)
        if "cache" in given:
            raise RuntimeError("cannot cache function")
        return lambda function: (function, "compiled")

    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(njit=njit))
    monkeypatch.setattr(compiled, "HAVE_NUMBA", True)
    assert compiled.compiled(len) == (len, "compiled")
    assert options == [{"cache": True, "nogil": True}, {"nogil": True}]


def test_without_numba_a_function_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "HAVE_NUMBA", False)
    assert compiled.compiled(len) is len

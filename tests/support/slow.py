"""Which cases of a table run with every change."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], sooner: Collection[Any]) -> list[Any]:
    """Return the cases of a ``parametrize``: those not in ``sooner`` are slow. A tuple has several arguments."""
    return [
        case
        if case in sooner
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]

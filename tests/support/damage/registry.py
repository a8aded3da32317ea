"""``Damage``: a replacement of one function or method, by name. No module here imports torch or autopipe."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE, MARKS = "AUTOPIPE_TEST_DAMAGE", "AUTOPIPE_TEST_DAMAGE_MARKS"
"""Environment: the names of damages, separated by commas; the folder of the files that show that each ran."""
Ran = Callable[[], None]
Replace = Callable[[Callable[..., Any], Ran], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Damage:
    """One replacement. ``replace``: (the original, what to call when the damage has an effect) -> its replacement."""

    name: str
    # the module and the path of the function in it, such as "Stepper.step"
    module: str
    path: str
    replace: Replace


DAMAGES: dict[str, list[Damage]] = {}


def add(name: str, module: str, path: str, replace: Replace) -> None:
    """Register a replacement. A damage with several has one name."""
    DAMAGES.setdefault(name, []).append(Damage(name, f"autopipe.{module}", path, replace))


def damages(module: str, path: str, name: str = "") -> Callable[[Replace], Replace]:
    """Register a function as the damage of its name."""

    def register(replace: Replace) -> Replace:
        add(name or replace.__name__, module, path, replace)
        return replace

    return register


def marking(name: str) -> Ran:
    """Return what marks that a damage ran in this process or another."""
    mark = Path(os.environ[MARKS]) / name
    return lambda: mark.touch()

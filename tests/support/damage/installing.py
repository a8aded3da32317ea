"""Installs the damages that the environment names, in the modules that are imported and in those that will be."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from support.damage.registry import DAMAGES, VARIABLE, Damage, marking


def install() -> None:
    """Install them in this process. Processes that it forks inherit them; new ones install theirs."""
    importlib.import_module("support.damage.damages")
    pending: dict[str, list[Damage]] = {}
    for name in os.environ[VARIABLE].split(","):
        for damage in DAMAGES[name]:
            pending.setdefault(damage.module, []).append(damage)
    for name in [name for name in pending if name in sys.modules]:
        _damage(sys.modules[name], pending.pop(name))
    if pending:
        sys.meta_path.insert(0, _Finder(pending))


def _damage(module: ModuleType, damages: Sequence[Damage]) -> None:
    for damage in damages:
        holder: Any = module
        *above, last = damage.path.split(".")
        for part in above:
            holder = getattr(holder, part)
        original = vars(holder)[last]
        kind = type(original) if isinstance(original, (staticmethod, classmethod)) else None
        function = original.__func__ if kind else original
        replaced = damage.replace(function, marking(damage.name))
        setattr(holder, last, kind(replaced) if kind else replaced)


class _Finder(importlib.abc.MetaPathFinder):
    """Damages a module when it has been imported."""

    def __init__(self, pending: dict[str, list[Damage]]) -> None:
        self._pending = pending

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        damages = self._pending.pop(name, None)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if damages else None
        if damages and spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _damage(module, damages)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

"""Write a callable or a constant of a module as source text, and collect the imports that it needs."""

from __future__ import annotations

import builtins
import functools
import importlib
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from autopipe.errors import TraceError

# public modules in which a function is looked up, the most usual first
_PLACES = {
    "F": "torch.nn.functional",
    "torch": "torch",
    "torch.fft": "torch.fft",
    "torch.linalg": "torch.linalg",
    "torch.special": "torch.special",
    "torch.nn.utils.rnn": "torch.nn.utils.rnn",
    "math": "math",
}


@functools.cache
def _public() -> dict[int, tuple[str, str]]:
    """Return, by id of a function, (place, name). Of several names, its ``__name__`` wins."""
    public: dict[int, tuple[str, str]] = {}
    for place, module in _PLACES.items():
        for name, value in sorted(vars(importlib.import_module(module)).items()):
            if name.startswith("_") or not callable(value):
                continue
            known = public.get(id(value))
            itself = getattr(value, "__name__", "") == name
            if known is None or (known[0] == place and itself):
                public[id(value)] = place, name
    return public


@dataclass
class Imports:
    """The imports of one file."""

    modules: set[str] = field(default_factory=set)  # "math", "torch"
    names: dict[str, tuple[str, str]] = field(default_factory=dict)  # name here -> (module, name there)

    def module(self, name: str) -> str:
        """Import a module under its own name."""
        self.modules.add(name)
        return name

    def name(self, module: str, name: str) -> str:
        """Import a name from a module; return its name in this file."""
        here, number = name, 2
        while self.names.get(here, (module, name)) != (module, name):
            here, number = f"{name}{number}", number + 1
        self.names[here] = module, name
        return here

    @property
    def taken(self) -> set[str]:
        """The names that the file's imports bind."""
        return {module.partition(".")[0] for module in self.modules} | set(self.names)

    def lines(self) -> list[str]:
        """Return the import lines in groups: standard library, packages, autopipe."""
        groups: tuple[list[str], list[str], list[str]] = ([], [], [])
        for module in sorted(self.modules):
            if module != "F":
                groups[_group(module)].append(f"import {module}")
        if "F" in self.modules:
            groups[1].append("import torch.nn.functional as F")
        by_module: dict[str, list[str]] = {}
        for here, (module, name) in sorted(self.names.items()):
            by_module.setdefault(module, []).append(name if here == name else f"{name} as {here}")
        for module, names in sorted(by_module.items()):
            groups[_group(module)].append(f"from {module} import {', '.join(names)}")
        lines: list[str] = []
        for group in groups:
            if group:
                lines += [*([""] if lines else []), *group]
        return lines


def _group(module: str) -> int:
    top = module.partition(".")[0]
    if top == "autopipe":
        return 2
    return 0 if top in sys.stdlib_module_names else 1


def callable_text(target: Callable[..., Any], imports: Imports) -> str:
    """Return the source text of a function or class.

    Raises: TraceError if it cannot be imported by its name.
    """
    known = _public().get(id(target))
    if known is not None:
        place, name = known
        imports.module("F" if place == "F" else place)
        return f"{place}.{name}"
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        imports.module("torch")
        _import_definition(target, imports)
        return f"torch.ops.{str(target).replace('::', '.')}"
    owner = getattr(target, "__self__", None)
    if isinstance(owner, type) and owner.__name__ != "_VariableFunctionsClass":
        return f"{callable_text(owner, imports)}.{target.__name__}"
    name = getattr(target, "__qualname__", "") or getattr(target, "__name__", "")
    name = name.removeprefix("_VariableFunctionsClass.")
    module = getattr(target, "__module__", None) or "torch"
    module = {"_operator": "operator", "torch._C._nn": "torch.nn.functional"}.get(module, module)
    if module == "builtins" and hasattr(builtins, name):
        return name
    if module == "torch._tensor" or name.startswith(("_TensorBase.", "TensorBase.", "Tensor.")):
        imports.module("torch")
        return f"torch.Tensor.{name.rpartition('.')[2]}"
    if module == "operator" and hasattr(operator, name):
        return f"{imports.module('operator')}.{name}"
    return _imported(target, module, name, imports)


def _import_definition(target: torch._ops.OpOverload | torch._ops.OpOverloadPacket, imports: Imports) -> None:
    """Import the module that defines an operator by ``torch.library.custom_op``: it exists where that has run."""
    name = str(target).replace(".", "::", 1).removesuffix(".default")
    definition: Any = OPDEFS.get(name)
    if definition is None:
        return
    module = definition._init_fn.__module__
    if module == "__main__":
        raise TraceError(
            f"the forward calls the operator {name}, which the script itself defines, and the stages do not run it",
            where=definition._init_fn.__code__.co_filename,
            remedy="define it in a module that the script imports",
        )
    imports.module(module)


def _imported(target: Any, module: str, name: str, imports: Imports) -> str:
    value: Any = _module(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    top, dot, rest = name.partition(".")
    if value is None or not all(part.isidentifier() for part in module.split(".")):
        raise TraceError(
            f"the forward calls {module}.{name}, which cannot be imported by that name, so a stage file cannot call it",
            where=getattr(getattr(target, "__code__", None), "co_filename", ""),
            remedy=f"define {name.rpartition('.')[2]} at the top level of a module",
        )
    if module.partition(".")[0] == "torch":
        imports.module(module)
        return f"{module}.{name}"
    return imports.name(module, top) + dot + rest


def _module(name: str) -> ModuleType | None:
    try:
        return sys.modules.get(name) or importlib.import_module(name)
    except ImportError:
        return None

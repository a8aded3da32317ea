"""Find the model in the user's module, and build it."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

from autopipe.errors import ModelFileError, unknown_choice, with_article
from autopipe.workload.hooks.candidates import is_own_class
from autopipe.workload.target.targets import advising, look_up, users_code

NAMES = ("model", "build_model", "get_model", "create_model", "Model")


_PLAIN = re.compile(r"(None|bool|int|float|str|tuple|list|dict|Optional|Union|Sequence|[\s\[\],.|()])*")


class NoModelError(ModelFileError):
    """The file has no model, several, or one that needs arguments."""

    def __init__(self, what: str, *, where: str, arguments: str | None = None) -> None:
        super().__init__(what, where=where)
        self.arguments = arguments  # options that give them; "" if one is an object; None if no model is chosen


@dataclass(frozen=True, slots=True)
class Builder:
    """The user's model before it is built."""

    origin: str  # human-readable: ``gpt.py:build_model``
    value: Any  # a module, a class of modules, or a callable that returns one
    arguments: Mapping[str, Any]
    path: str  # of the model file

    def build(self) -> nn.Module:
        """Return a new model: the result of the callable, or a copy of the instance as it was after the import.

        Raises: ModelFileError if the user's code fails or does not return a module.
        """
        if isinstance(self.value, nn.Module):
            with users_code(f"copying {self.origin}", self.path):
                return copy.deepcopy(self.value)
        with self._advice(), users_code(f"building {self.origin}", self.path):
            model = self.value(**self.arguments)
        if not isinstance(model, nn.Module):
            raise ModelFileError(
                f"{self.origin} returned {with_article(type(model).__name__)}, not a torch.nn.Module",
                where=self.path,
                remedy="return the model, or name another attribute: file.py:ATTR",
            )
        if getattr(model.forward, "__name__", "") == "_forward_unimplemented":
            remedy = "write its forward, or name another model: file.py:ATTR"
            if hasattr(model, "training_step"):
                remedy = (
                    "a module whose loss is computed by training_step needs a subclass with "
                    "def forward(self, *batch): return self.training_step(batch, 0)"
                )
            raise ModelFileError(
                f"{self.origin}: {type(model).__name__} has no forward", where=self.path, remedy=remedy
            )
        return model

    def _advice(self) -> contextlib.AbstractContextManager[None]:
        if not self.arguments:
            return contextlib.nullcontext()
        options = " ".join(shlex.quote(f"{name}={value!r}") for name, value in self.arguments.items())
        return advising(f"see whether the model takes --arg {options}; or correct that line")


def find_builder(module: ModuleType, attribute: str, label: str, arguments: Mapping[str, str]) -> Builder:
    """Find the model in the user's module: by ``attribute``, else by the usual names, else the only class.

    Raises: NoModelError for no model, several, or one that needs arguments; ModelFileError for another object.
    """
    path = getattr(module, "__file__", None) or ""
    if attribute:
        value = look_up(module, attribute, label)
        if not _may_be_model(value):
            raise ModelFileError(
                f"{label}:{attribute} is {with_article(type(value).__name__)}",
                where=path,
                remedy="name an nn.Module instance, a subclass of it, or a callable that returns one",
            )
    else:
        attribute, value = _search(module, label, path)
    origin = f"{label}:{attribute}"
    return Builder(origin, value, _bind(value, arguments, origin, path), path)


def _may_be_model(value: Any) -> bool:
    return isinstance(value, nn.Module) or (callable(value) and not isinstance(value, ModuleType))


def _search(module: ModuleType, label: str, path: str) -> tuple[str, Any]:
    for name in NAMES:
        if name in vars(module) and _may_be_model(vars(module)[name]):
            return name, vars(module)[name]
    classes = [name for name, value in vars(module).items() if is_own_class(value, module, nn.Module)]
    if len(classes) == 1:
        return classes[0], vars(module)[classes[0]]
    if classes:
        raise NoModelError(f"several models in {label}: {', '.join(classes)}", where=path)
    looked = f"looked for {', '.join(NAMES)}, then for the only nn.Module subclass defined there"
    raise NoModelError(f"no model found in {label}: {looked}", where=path)


def _bind(value: Any, arguments: Mapping[str, str], origin: str, path: str) -> dict[str, Any]:
    """Parse ``--arg`` values as Python literals, else as strings, and check their names against the signature."""
    parsed = {name: _literal(text) for name, text in arguments.items()}
    if isinstance(value, nn.Module):
        if parsed:
            raise ModelFileError(
                f"{origin} is a model that is already built; it cannot take --arg {next(iter(parsed))}",
                where=path,
                remedy="name its class or a function that builds it",
            )
        return {}
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return parsed
    parameters = signature.parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        known = [name for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_POSITIONAL]
        for name in parsed:
            if name not in known:
                raise ModelFileError(f"{origin}: {unknown_choice('argument', name, known)}", where=path)
    missing = {
        name: p.annotation
        for name, p in parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in parsed
    }
    if missing:
        are_plain = all(_is_plain(annotation) for annotation in missing.values())
        raise NoModelError(
            f"{origin}{signature} needs {', '.join(missing)}",
            where=path,
            arguments=" ".join(f"--arg {name}=VALUE" for name in missing) if are_plain else "",
        )
    return parsed


def _is_plain(annotation: Any) -> bool:
    """Return whether a value with this annotation can be written in a command; True without an annotation."""
    if annotation is inspect.Parameter.empty:
        return True
    return (
        _PLAIN.fullmatch(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))
        is not None
    )


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def forward_names(model: type[nn.Module] | nn.Module) -> tuple[str, ...]:
    """Return the parameter names of the model's forward; () if its signature cannot be read."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return ()
    if isinstance(model, type):
        parameters = parameters[1:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)

"""What a snapshot keeps to restore the state that it has seen."""

from __future__ import annotations

import contextlib
import contextvars
import types
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from autopipe.trace.record.containers import refill
from autopipe.trace.state.snapshots.arrays import fill
from autopipe.trace.state.snapshots.places import slots
from autopipe.trace.state.snapshots.settings import SETTINGS


@dataclass
class Kept:
    """The contents of owners, each as it was when the snapshot came to it."""

    containers: list[tuple[Any, Any]] = field(default_factory=list)  # and the attributes of objects
    cells: list[tuple[types.CellType, Any]] = field(default_factory=list)  # of closures
    variables: list[tuple[contextvars.ContextVar[Any], Any]] = field(default_factory=list)
    bound: list[tuple[Any, str, Any]] = field(default_factory=list)  # names of modules and classes
    functions: list[tuple[types.FunctionType, dict[str, Any]]] = field(default_factory=list)  # what they run with
    slots: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    trained: list[tuple[nn.Parameter, bool]] = field(default_factory=list)
    arrays: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)  # with their fingerprints
    streams: list[tuple[Any, Any]] = field(default_factory=list)  # streams in memory, with their state
    settings: dict[str, Any] = field(default_factory=dict)

    def restore(self) -> None:
        """Restore everything. Generators that the user owns are not restored."""
        for container, before in self.containers:
            refill(container, before)
        for cell, before in self.cells:
            cell.cell_contents = before
        for variable, content in self.variables:
            if variable.get(None) is not content:
                variable.set(content)
        for owner, name, value in self.bound:
            if (
                getattr(owner, name) is not value
                if isinstance(owner, types.FunctionType)
                else vars(owner).get(name) is not value
            ):
                setattr(owner, name, value)
        for function, content in self.functions:
            for name, value in content.items():
                if getattr(function, name) is not value:
                    setattr(function, name, value)
        for owner, content in self.slots:
            for name, value in content.items():
                if slots(owner).get(name) is not value:
                    object.__setattr__(owner, name, value)
        for parameter, trained in self.trained:
            parameter.requires_grad_(trained)
        for array, before in self.arrays:
            fill(array, before)
        for stream, state in self.streams:
            if not stream.closed and stream.__getstate__() != state:
                with contextlib.suppress(BufferError):  # a part of it is in use
                    stream.__setstate__(state)
        SETTINGS.restore(self.settings)


__all__ = ["Kept"]

"""``Running``: one call of the forward before it runs, and ``Performed`` after it has run on fakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from autopipe.trace.record.targets import Call


@dataclass(slots=True)
class Running:
    """One call that the user's code makes. ``run`` runs it on fakes."""

    run: Callable[[Any, Any], Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: Callable[[tuple[Any, ...], dict[str, Any]], Call]
    name: str
    target: Any  # what identifies it: a function, a module, or a class
    state: Sequence[Tensor] = ()  # other tensors that it may change
    silent: Sequence[Tensor] = ()  # and those that it changes
    inner: list[Any] | None = None  # of a function of the user's own: receives the calls in it


@dataclass(slots=True)
class Performed:
    """A call after it has run on fakes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    changed: list[Tensor]
    drawn: tuple[int, int]  # the position of its first draw, and how many there were


class Tape(Protocol):
    """What receives the calls of a recorder before they are recorded; see ``trace.tape``."""

    def call(self, call: Running) -> Any:
        """Return the result of a call."""

    def number(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return the number that a call reads from a tensor, or NOT_FIXED."""

    def version(self) -> Any:
        """Return what stands for the number of times that a tensor was written."""

    def alias(self, value: Tensor, of: Tensor) -> None:
        """Take ``value`` for another object of ``of``."""

    def watched(self, apply: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
        """Return a function of the user's own that notes the calls in it."""

"""``Gradients``: what the script sees as ``p.grad``. The gradients themselves are on the ranks until it looks.

As with weights, no write is observed: a gradient that was read is compared with a copy before the next command that
depends on it, and sent back if it differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from autopipe.bits import same_bits
from autopipe.script.state.parked import on_host, plain_of, storage_uses

_OWN_REFERENCES = 3  # the dictionary, the variable of the loop, and the argument of getrefcount


class Gradients:
    """The gradients by name of the parameter. ``ask``, ``send`` and ``scatter`` reach all ranks."""

    def __init__(
        self,
        ask: Callable[[list[Any]], list[Any]],
        send: Callable[[list[Any]], None],
        scatter: Callable[[list[Any], dict[str, Any]], None],
    ) -> None:
        self._ask, self._send, self._scatter = ask, send, scatter
        self.any = False  # whether a rank may have a gradient
        self._known = False  # whether ``seen`` is complete
        self.seen: dict[str, Tensor | None] = {}
        self._copies: dict[str, Tensor | None] = {}
        self.reads = 0

    def get(self, name: str) -> Tensor | None:
        """Return the gradient of a parameter: the same object until it is dropped."""
        if not self.any:
            return None
        if not self._known:
            self._fetch()
        return self.seen.get(name)

    def _fetch(self) -> None:
        self.reads += 1
        self._known = True
        for answer in self._ask(["gradients"]):
            for name, value in answer.items():
                old = self.seen.get(name)
                if old is not None and value is not None:
                    plain_of(old).copy_(plain_of(value))
                else:
                    self.seen[name] = value
        self._copies = {name: None if value is None else on_host(value) for name, value in self.seen.items()}

    def set(self, name: str, value: Tensor | None) -> None:
        """Replace the gradient of a parameter."""
        if value is None:
            if self.any and not (self._known and self.seen.get(name) is None):
                self.push()
                self._send(["zero", [name], True])
                self.seen[name] = self._copies[name] = None
            return
        if self.any and not self._known:
            self._fetch()
        self.any = self._known = True
        self.seen[name], self._copies[name] = value, on_host(value)
        self._scatter(["write_gradients"], {name: value})

    def zero(self, names: Sequence[str] | None, to_none: bool) -> None:
        """Drop gradients, or set them to zero; None for all parameters."""
        if not self.any:
            return
        self.push()
        self._send(["zero", None if names is None else list(names), to_none])
        for name in list(self.seen) if names is None else names:
            known = self.seen.get(name)
            if to_none:
                if self._known:
                    self.seen[name] = self._copies[name] = None
                else:
                    self.seen.pop(name, None)
            elif known is not None:
                plain_of(known).zero_()
                self._copies[name] = on_host(known)
        if names is None and to_none:
            self.any, self._known = False, False
            self.seen, self._copies = {}, {}

    def push(self) -> None:
        """Send what the script has changed. Call it before a command that depends on gradients."""
        changed: dict[str, Tensor] = {}
        for name, value in self.seen.items():
            copy = self._copies.get(name)
            if value is not None and (copy is None or not same_bits(plain_of(value), copy)):
                changed[name] = value
                self._copies[name] = on_host(value)
        if changed:
            self._scatter(["write_gradients"], changed)

    def moved(self) -> None:
        """Note that a backward, or a scaling, has changed the gradients on the ranks."""
        self.any, self._known = True, False
        kept: dict[str, Tensor | None] = {}
        for name in list(self.seen):
            value = self.seen[name]
            # torch adds to a gradient in place: what the script keeps of it must follow
            if value is not None and (sys.getrefcount(value) > _OWN_REFERENCES or storage_uses(value) > 1):
                kept[name] = value
        self.seen, self._copies = kept, {}
        if kept:
            del value
            self._fetch()

    def names(self, wanted: Iterable[str]) -> list[str]:
        """Return the parameters among ``wanted`` that have a gradient, in their order."""
        return [name for name in wanted if self.get(name) is not None]

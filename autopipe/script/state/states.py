"""``States``: ``optimizer.state`` of an optimizer whose copies on the ranks step. Any access reads it from them."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from autopipe.bits import same_bits
from autopipe.script.state.parked import on_host, plain_of, storage_uses

_OWN_REFERENCES = 3  # the dictionary, the variable of the loop, and the argument of getrefcount


class States(defaultdict[Any, Any]):
    """The state by parameter. ``read``: returns the ranks' state by name. ``write``: sends changes."""

    def __init__(
        self,
        parameters: dict[str, Tensor],
        values: dict[Any, Any],
        read: Callable[[], dict[str, dict[str, Any]]],
        write: Callable[[dict[str, dict[str, Any] | None]], None],
    ) -> None:
        super().__init__(dict)
        self._parameters, self._read, self._write = parameters, read, write
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._stale, self._opened = False, False
        self._copies: dict[str, dict[str, Any]] = {}
        for parameter, state in values.items():
            dict.__setitem__(self, parameter, state)
        if values:
            self._open()

    def by_name(self) -> dict[str, dict[str, Any]]:
        """Return what is here now, by name of the parameter."""
        return {self._names[id(key)]: dict(value) for key, value in dict.items(self) if id(key) in self._names}

    def moved(self) -> None:
        """Note that a step has changed the state on the ranks."""
        self._stale = True
        if self._opened and self._is_shared():
            self._open()
        elif self._opened:
            self._opened, self._copies = False, {}

    def _is_shared(self) -> bool:
        for state in dict.values(self):
            if sys.getrefcount(state) > _OWN_REFERENCES:
                return True
            for value in state.values():
                if isinstance(value, Tensor) and (sys.getrefcount(value) > _OWN_REFERENCES or storage_uses(value) > 1):
                    return True
        return False

    def push(self) -> None:
        """Send what the script has changed. Call it before a step."""
        if not self._opened:
            return
        now = self.by_name()
        changed: dict[str, dict[str, Any] | None] = {name: None for name in self._copies if name not in now}
        for name, state in now.items():
            copy = self._copies.get(name)
            if copy is None or copy.keys() != state.keys() or any(_differ(state[key], copy[key]) for key in state):
                changed[name] = state
        if changed:
            self._write(changed)
        self._copy()

    def _open(self) -> None:
        """Bring the state here, into the same tensors where the script may have kept them."""
        if self._stale:
            self._stale = False
            arrived = self._read()
            for name, state in arrived.items():
                old = dict.get(self, self._parameters[name])
                if old is None:
                    dict.__setitem__(self, self._parameters[name], state)
                    continue
                for key, value in state.items():
                    kept = old.get(key)
                    if isinstance(kept, Tensor) and isinstance(value, Tensor) and kept.shape == value.shape:
                        plain_of(kept).copy_(plain_of(value))
                    else:
                        old[key] = value
                for key in [key for key in old if key not in state]:
                    del old[key]
            for parameter in [key for key in dict.keys(self) if self._names.get(id(key)) not in arrived]:
                dict.__delitem__(self, parameter)
        if not self._opened or not self._copies:
            self._opened = True
        self._copy()

    def _copy(self) -> None:
        self._copies = {
            name: {key: on_host(value) if isinstance(value, Tensor) else value for key, value in state.items()}
            for name, state in self.by_name().items()
        }

    def _access(self) -> None:
        if self._stale or not self._opened:
            self._open()

    def __reduce__(self) -> Any:
        self._access()
        return defaultdict, (dict, dict(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        self._access()
        return copy.deepcopy(defaultdict(dict, dict.items(self)), memo)


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return not same_bits(plain_of(a), plain_of(b))
    return type(a) is not type(b) or bool(a != b)


def _opening(name: str) -> Any:
    method = getattr(defaultdict, name)

    def opened(self: States, *args: Any, **kwargs: Any) -> Any:
        self._access()
        return method(self, *args, **kwargs)

    opened.__name__ = name
    return opened


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__", "__contains__", "__eq__", "__ne__", "__or__",
    "__ior__", "__ror__", "__reversed__", "__repr__", "__copy__", "get", "items", "keys", "values", "pop", "popitem",
    "clear", "update", "setdefault", "copy",
):  # fmt: skip
    setattr(States, _name, _opening(_name))

"""What identifies a call: function, modes and arguments, with each tensor as the number of a value.

Python numbers are compared by type and bits, text and settings as they are, tensors and arrays that Python holds by
their bytes at each use.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from autopipe.bits import bytes_of
from autopipe.errors import AutopipeError
from autopipe.trace.explain import unsupported
from autopipe.trace.numbers import Lifted
from autopipe.trace.record.leaves import parts_of
from autopipe.trace.record.values import SYMBOLIC
from autopipe.trace.state.refusal import KEEP
from autopipe.trace.tape.live import LiveModel

Key = tuple[Hashable, ...]

_PLAIN = (bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(...))
_SMALL = 1 << 16  # bytes of a tensor that are part of the key; of a larger one, it is a number for its content


class Value(int):
    """The number of a value in a key; it equals no number of Python."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Value and int(self) == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return int(self)


class Contents:
    """Numbers for the contents of large tensors that Python holds: equal numbers, equal bytes."""

    def __init__(self) -> None:
        self._seen: list[Tensor] = []

    def number(self, value: Tensor) -> int:
        """Return the number of the bytes of a tensor; a new content is copied."""
        content = bytes_of(value.detach().cpu())
        for number, other in enumerate(self._seen):
            if other.shape == content.shape and torch.equal(other, content):
                return number
        self._seen.append(content.clone())
        return len(self._seen) - 1


class Keys:
    """The values of one run by tensor, and the keys of its calls.

    ``origin``: returns what identifies a tensor of an earlier run, if it depends on nothing but constants.
    """

    def __init__(self, live: LiveModel, contents: Contents, origin: Callable[[Tensor], Hashable | None]) -> None:
        self._live, self._contents, self._origin = live, contents, origin
        self._numbers: dict[int, Value] = {}
        self.alive: list[Any] = []  # ids are unique only among live objects
        self._aliases: list[Any] = []
        # values that nothing trained may depend on, with the error if something does
        self._dead: dict[int, tuple[Tensor, Exception]] = {}
        self.why_dead: Exception | None = None  # of such a value in the latest key
        # parameters that were read, but for ``requires_grad_`` -> whether they required a gradient then
        self.trained: dict[str, set[bool]] = {}
        self._sets = False  # the key is that of such a call

    def add(self, values: list[Tensor]) -> None:
        """Give the next numbers to new values."""
        for value in values:
            self._numbers[id(value)] = Value(len(self.alive))
            self.alive.append(value)

    def alias(self, value: Tensor, of: Tensor) -> None:
        """Give a tensor the number of another one."""
        number = self._numbers.get(id(of))
        if number is not None:
            self._numbers[id(value)] = number
            self._aliases.append(value)

    def add_dead(self, values: list[Tensor], why: Exception) -> None:
        """Note values that nothing trained may depend on. ``why``: the error if something does."""
        for value in values:
            if self.number(value) is None:
                self._dead[id(value)] = value, why

    def is_dead(self, value: Tensor) -> bool:
        """Return whether a value comes from a tensor that an earlier run made. Then ``why_dead`` is its error."""
        if id(value) in self._dead:
            self.why_dead = self._dead[id(value)][1]
            return True
        if not isinstance(value, FakeTensor) or self.number(value) is not None or self._origin(value) is not None:
            return False
        self.why_dead = of_an_earlier_run(value)
        return True

    def clear(self) -> None:
        """Forget the values."""
        self._dead.clear()
        self.why_dead = None
        self._numbers.clear()
        self.alive.clear()
        self._aliases.clear()

    def number(self, value: Any) -> Hashable:
        """Return the number of a value; the name of a parameter or buffer; None for any other tensor."""
        number = self._numbers.get(id(value))
        if number is not None:
            return number
        name = self._live.state.get(id(value))
        if name is None and id(value) in self._live.of_real:
            name = self._live.state.get(id(self._live.of_real[id(value)]))
        return name

    def of(self, target: Any, modes: tuple[Any, ...], *arguments: Any) -> Key:
        """Return the key of a call. Raises: TraceError for an argument that cannot be compared."""
        key: list[Any] = [target, *modes]
        self._sets, self.why_dead = target is Tensor.requires_grad_, None
        for argument in arguments:
            if argument:
                self._walk(argument, key)
        return tuple(key)

    def of_module(self, path: str, module: nn.Module) -> Key:
        """Return what identifies a module of torch whose calls are one call: its path, and what its code reads."""
        key: list[Any] = [path]
        for part in parts_of(module):
            own, kind = vars(part), type(part)
            key += (kind, kind.forward, id(own.get("forward")))
            names: tuple[str, ...] = read_by(kind)  # type: ignore[arg-type]  # a class is hashable
            for name in names:
                if name in own:
                    key.append(name)
                    value = own[name]
                    if isinstance(value, (int, float, *_PLAIN, tuple)):
                        self._walk(value, key)
                    else:
                        key.append(id(value))
            parameters = [p for p in part._parameters.values() if p is not None]
            key += [part.training, *(p.requires_grad for p in parameters)]
            for parameter in parameters:
                self.trained.setdefault(self._live.state.get(id(parameter), ""), set()).add(parameter.requires_grad)
        return tuple(key)

    def _walk(self, value: Any, key: list[Any]) -> None:
        kind = type(value)
        if kind is FakeTensor or isinstance(value, Tensor):
            key.append(self.of_tensor(value))
        elif kind is int:
            key += (int, value)
        elif kind is float:
            key += (float, value if value and not math.isnan(value) else repr(value))  # 0.0 equals -0.0
        elif isinstance(value, _PLAIN):
            key += (kind, value)
        elif kind is Lifted:
            key.append(value)
        elif isinstance(value, (tuple, list)):
            key += (kind, len(value))
            for entry in value:
                self._walk(entry, key)
        elif isinstance(value, dict):
            key += (kind, len(value))
            for name, entry in value.items():
                key.append(name)
                self._walk(entry, key)
        elif kind is slice:
            key.append(slice)
            for entry in (value.start, value.stop, value.step):
                self._walk(entry, key)
        elif isinstance(value, (int, float, complex, np.generic, *SYMBOLIC)):
            key += (kind, str(value) if isinstance(value, SYMBOLIC) else repr(value))
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            key += (kind, value.shape, value.dtype.str, value.tobytes())
        elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            key.append(value)
        else:
            raise unsupported(
                f"an argument of type {kind.__name__}", "pass tensors, numbers, text, or lists and dicts of them"
            )

    def of_tensor(self, value: Tensor) -> Hashable:
        """Return what identifies a tensor: its number, its name, or its content if Python holds it."""
        number = self._numbers.get(id(value))
        if number is not None:
            return number
        name = self.number(value)
        if name is not None:
            requires_grad = self._live.fake[str(name)].requires_grad
            if not self._sets:
                self.trained.setdefault(str(name), set()).add(requires_grad)
            return (name, requires_grad)
        if self.is_dead(value):
            return ("dead",)
        return ("kept", self._origin(value)) if isinstance(value, FakeTensor) else self._content(value)

    def _content(self, value: Tensor) -> Hashable:
        """Return what identifies a tensor that Python holds: its form and its bytes."""
        with unset_fake_temporarily(), torch._C.DisableTorchFunction():
            form: Key = (value.dtype, tuple(value.shape), str(value.device), value.requires_grad)
            if value.layout != torch.strided or value.is_meta:
                return (*form, id(value), value._version)
            form = (*form, value.stride())
            if value.numel() * value.itemsize > _SMALL:
                return (*form, self._contents.number(value))
            return (*form, bytes_of(value.detach().cpu()).numpy().tobytes())


def of_an_earlier_run(value: Tensor) -> AutopipeError:
    """Return the error for a tensor that is read, and that an earlier run has made from what only that one had."""
    why = "that an earlier microbatch made, or a call that cannot be recorded"
    return unsupported(f"a tensor of shape {tuple(value.shape)} is read {why}", KEEP)


@functools.cache
def read_by(kind: Any) -> tuple[str, ...]:
    """Return the names of attributes that the methods of a class of torch may read."""
    names: set[str] = set()
    for base in kind.__mro__:
        if base in (nn.Module, object):
            continue
        for value in vars(base).values():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                names.update(function.__code__.co_names)
    return tuple(sorted(names - {"training", "_flat_weights", "_flat_weight_refs", "_parameters", "_buffers"}))

"""Results of calls: their form, whether the user's code keeps one, and a number that only a stage knows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from autopipe.trace.explain import unsupported
from autopipe.trace.record.values import storage_key, tensors_in
from autopipe.trace.state.refusal import KEEP


def forms_of(values: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    """Return the forms of the fakes among tensors: what Python may read of them, and how many attributes they have."""
    return [
        (tuple(value.shape), tuple(value.stride()), value.dtype, value.requires_grad, len(vars(value)))
        if value.layout == torch.strided
        else ()
        for value in values
        if isinstance(value, FakeTensor)
    ]


def forms_with_memory(result: Any, touched: Sequence[Tensor]) -> Hashable:
    """Return the forms of the tensors that a call returns, and which of those that it read share their memory."""
    tensors = [value for value in tensors_in(result) if isinstance(value, FakeTensor)]
    shared = tuple(tuple(storage_key(other) == storage_key(value) for other in touched) for value in tensors)
    return tuple(form[:-1] for form in forms_of(tensors)), shared


def is_held(results: list[Tensor], own: int) -> bool:
    """Return whether something else has one of the results, too: the user's code has kept it in an earlier run.

    ``own``: references that a result has in any case. torch's C++ adds one if it uses the tensor.
    """
    for place in range(len(results)):
        result: Any = results[place]
        if getrefcount(result) - (result._use_count() > 1) > own:
            return True
    return False


OWN = next(count for count in range(8) if not is_held([torch.empty(0)], count))
"""References to a result that only a list has."""


def is_rebuilt(value: Any) -> bool:
    """Return whether ``built`` makes a new result; for another kind of result, the call runs again."""
    if isinstance(value, (tuple, list)):
        return all(map(is_rebuilt, value))
    if type(value) is dict:
        return all(map(is_rebuilt, value.values()))
    return value is None or isinstance(value, (Tensor, int, float, complex, str, torch.SymInt, torch.SymFloat))


def form_of(value: Any, touched: Sequence[Tensor], is_old: Callable[[Tensor], bool], results: list[Tensor]) -> Any:
    """Return the form of a result, and add its new tensors to ``results``. ``touched``: of the arguments."""
    if isinstance(value, Tensor):
        place = next((i for i, tensor in enumerate(touched) if tensor is value), -1)
        if place >= 0 and is_old(value):
            return ("argument", place)
        results.append(value)
        return ("result", len(results) - 1)
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(form_of(entry, touched, is_old, results) for entry in value))
    if isinstance(value, dict):
        return (type(value), {name: form_of(entry, touched, is_old, results) for name, entry in value.items()})
    return ("constant", value)


def built(form: Any, touched: Sequence[Tensor], results: Sequence[Tensor]) -> Any:
    """Return a result of a form: new containers, so that one which the user's code keeps is not seen again."""
    kind, content = form
    if kind == "argument":
        return touched[content]
    if kind == "result":
        return results[content]
    if kind == "constant":
        return content
    if issubclass(kind, dict):
        return kind((name, built(entry, touched, results)) for name, entry in content.items())
    entries = [built(entry, touched, results) for entry in content]
    if kind in (tuple, list) or not hasattr(kind, "_fields"):
        return kind(entries)
    return tuple.__new__(kind, entries)


VERSION_READ = "how often a tensor was written (_version) is read"


class Unknown:
    """A number that only a stage knows. It can be printed, and nothing else."""

    def __init__(self, noting: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._noting = noting

    def __str__(self) -> str:
        return "?"

    def __format__(self, form: str) -> str:
        return "?"

    def _refuse(self, *_: object) -> Any:
        with self._noting():
            raise unsupported(VERSION_READ, KEEP)

    __repr__ = __str__
    __lt__ = __gt__ = __le__ = __ge__ = __eq__ = __ne__ = __hash__ = __bool__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = _refuse
    __int__ = __index__ = __float__ = _refuse

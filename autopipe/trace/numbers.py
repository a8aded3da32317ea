"""Python numbers that change from step to step, as inputs of the graph.

A number is identified by the call that gets it: the function, the line of the user's code, and which call of the
function it is there. The graph reads it with ``item()`` from a tensor without dimensions, so that torch gets the same
Python number as in a plain loop.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopipe.ir.graph import Graph, Input, Number
from autopipe.ir.tensor import TensorSpec
from autopipe.trace.explain import calling_frame, short_path
from autopipe.workload import Item, Workload

Call = tuple[str, str, int]
"""Function, file:line, and which call of the function it is on that line."""

CHANGING = "its Python changes what it does from step to step"
MOST_NUMBERS = 64  # of a model, that may change
_SHOWN = 3
_LARGEST = 1 << 62
DTYPES = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}


@dataclass(frozen=True, slots=True)
class Lifted:
    """A number in a call that is recorded. ``name``: of the input of the graph."""

    name: str
    value: Any = field(compare=False)


def plain(arguments: Any) -> Any:
    """Return arguments with the numbers themselves."""
    return pytree.tree_map_only(Lifted, lambda number: number.value, arguments)


def kind_of(value: Any) -> str:
    """Return the kind of a number as in ``ir.graph.Number``; "" for anything else."""
    return type(value).__name__ if type(value) in (bool, int, float) else ""


def spec_of(kind: str) -> TensorSpec:
    """Return the spec of the input for a number."""
    return TensorSpec((), str(DTYPES[kind]).removeprefix("torch."), False)


def tensors_of(inputs: Iterable[Input], values: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """Return the inputs of a graph for numbers, by name; None: for their first values."""
    tensors = {}
    for entry in inputs:
        if entry.number is not None:
            value = entry.number.value if values is None else values[entry.name]
            tensors[entry.name] = torch.tensor(value, dtype=DTYPES[entry.number.kind])
    return tensors


def note_of(graph: Graph) -> str:
    """Return the note for a model that varies: which numbers travel with each microbatch, and where they are."""
    places = []
    for entry in graph.numbers:
        if (number := entry.number) is not None:
            path, _, line = number.place.rpartition(":")
            places.append(f"{number.hint} in {number.function} at {short_path(path)}:{line}")
    more = f", and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    travel = f"; these numbers travel with it: {', '.join(places[:_SHOWN])}{more}" if places else ""
    return (
        "the model's Python changes what forward and loss do from step to step: it runs for each microbatch in a "
        f"process beside rank 0 (--data-reader beside){travel}"
    )


class Numbers:
    """The numbers in the calls of one run. ``inputs``: those of the graph. ``seen``: receives those of all calls."""

    def __init__(self, inputs: Iterable[Input], seen: dict[Call, list[tuple[int, Any]]] | None = None) -> None:
        self.inputs = {entry.name: entry for entry in inputs}
        self.seen = seen
        self.values: dict[str, Any] = {}
        self._calls: dict[Call, list[Input]] = {}
        for entry in self.inputs.values():
            if (number := entry.number) is not None:
                self._calls.setdefault((number.function, number.place, number.call), []).append(entry)
        self._functions = {function for function, *_ in self._calls}
        self._counts: Counter[tuple[str, str]] = Counter()

    def replaced(
        self, function: str, args: Any, kwargs: Any, by: Callable[[Input, Any], Any]
    ) -> tuple[Any, Any] | None:
        """Return the arguments of a call with other objects for the numbers of ``inputs``; None if it has none."""
        if self.seen is None and function not in self._functions:
            return None
        frame = calling_frame()
        if frame is None:
            return None
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        call = function, place, self._counts[function, place]
        self._counts[function, place] += 1
        inputs = self._calls.get(call, ())
        if self.seen is None and not inputs:
            return None
        flat, structure = pytree.tree_flatten((args, kwargs))
        if self.seen is not None:
            self.seen[call] = [(index, value) for index, value in enumerate(flat) if kind_of(value)]
        changed = False
        for entry in inputs:
            number = entry.number
            if number is not None and number.argument < len(flat) and kind_of(flat[number.argument]) == number.kind:
                flat[number.argument], changed = by(entry, flat[number.argument]), True
        return pytree.tree_unflatten(flat, structure) if changed else None

    def all_values(self) -> dict[str, Any]:
        """Return the number of this run for each input; the first one where it had none."""
        first = {entry.name: entry.number.value for entry in self.inputs.values() if entry.number is not None}
        return {**first, **self.values}

    def lifted(self, function: str, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments of a call that is recorded, with each number of ``inputs`` as ``Lifted``."""

        def lift(entry: Input, value: Any) -> Lifted:
            self.values[entry.name] = {"bool": bool, "int": int, "float": float}[kind_of(value)](value)
            return Lifted(entry.name, value)

        return self.replaced(function, args, kwargs, lift)


def changed_numbers(
    before: Mapping[Call, list[tuple[int, Any]]], now: Mapping[Call, list[tuple[int, Any]]], known: tuple[Input, ...]
) -> tuple[Input, ...]:
    """Return inputs for the numbers in which two runs differ. ``known``: the inputs that there are."""
    places = {(n.function, n.place, n.call, n.argument) for n in (entry.number for entry in known) if n is not None}
    new: list[Input] = []
    for call, numbers in before.items():
        for (place, value), (other_place, other) in zip(numbers, now.get(call, ()), strict=False):
            kind = kind_of(value)
            if place != other_place or kind != kind_of(other) or repr(value) == repr(other) or (*call, place) in places:
                continue
            if (kind == "float" and not math.isfinite(value)) or (kind == "int" and abs(value) > _LARGEST):
                continue
            hint = repr({"bool": bool, "int": int, "float": float}[kind](value))
            name = f"number_{len(known) + len(new)}"
            new.append(Input(name, spec_of(kind), Number(*call, place, kind, hint)))
    return tuple(new)


class _FirstValues(TorchFunctionMode):
    """Gives the calls of a run the first values of the numbers, whatever the Python of the model has by now."""

    def __init__(self, inputs: Iterable[Input]) -> None:
        super().__init__()
        self._numbers = Numbers(inputs)

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "_opname", "") or getattr(func, "__name__", "")
        changed = self._numbers.replaced(name, args, kwargs or {}, lambda entry, _: entry.number and entry.number.value)
        args, kwargs = changed or (args, kwargs or {})
        return func(*args, **kwargs)


class WithNumbers:
    """A workload whose changing numbers are inputs: with them, model and loss are functions of the batch.

    Its Python may make other calls, too, for some batches. ``begin``: puts it back to where it makes those of the first
    one; called before each run.
    """

    varies = True

    def __init__(self, workload: Workload, inputs: tuple[Input, ...], begin: Callable[[], None] = lambda: None) -> None:
        self._workload, self.numbers, self.begin = workload, inputs, begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def leaves(self, item: Item) -> dict[str, Tensor]:
        """Return the tensors of an item, and those with the first values of the numbers."""
        return {**self._workload.leaves(item), **tensors_of(self.numbers)}

    def loss(self, model: nn.Module, item: Item) -> tuple[Tensor, Tensor | None]:
        """Return the loss of a batch with the first values of the numbers."""
        if not any(isinstance(parameter, FakeTensor) for parameter in model.parameters()):
            self.begin()  # ``follow`` does before the tensors of the model are fakes
        with _FirstValues(self.numbers):
            return self._workload.loss(model, item)

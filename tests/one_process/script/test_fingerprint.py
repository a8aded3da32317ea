"""What a forward may read: a change of it needs another recording, and a change of anything else must not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from autopipe.script.calls.fingerprint import fingerprint

weight, factor = 1.0, 2.0
shift, offset = 0.5, 0.25


class Model(nn.Module):
    """Has an attribute with the name of a global, and reads another global."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * factor


def test_a_global_with_the_name_of_an_attribute_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    before = fingerprint(model)
    monkeypatch.setitem(globals(), "weight", 3.0)
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("old", "new"), [(2.0, 3.0), (0.0, -0.0), (1.0, 1), (complex(0.0, 0.0), complex(0.0, -0.0)), (1.0, float("nan"))]
)
def test_a_global_number_that_the_forward_names_is_read(
    monkeypatch: pytest.MonkeyPatch, old: complex, new: complex
) -> None:
    model = Model()
    monkeypatch.setitem(globals(), "factor", old)
    before = fingerprint(model)
    monkeypatch.setitem(globals(), "factor", new)
    changed = fingerprint(model)
    assert changed != before and changed == fingerprint(model)


def shifted(x: Tensor) -> Tensor:
    """Read a global."""
    return x + shift


def moved(x: Tensor) -> Tensor:
    """Read another global."""
    return x + offset


class Shift:
    """Reads a global when it is called, or when an entry is taken."""

    unused = 0

    def __call__(self, x: Tensor) -> Tensor:
        return x + shift

    def __getitem__(self, x: Tensor) -> Tensor:
        return x + shift

    def __repr__(self) -> str:
        return f"Shift({offset})"


@dataclass
class Scaled:
    """Reads a global when it is made."""

    x: Tensor

    def __post_init__(self) -> None:
        self.x = self.x + shift


class Holding(nn.Module):
    """Calls what it holds, in one of several ways."""

    table: ClassVar[Any] = None

    def __init__(self, content: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.content = content


class InAnObject(Holding):
    """Calls a function of an object."""

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.content.function(x))


class InAList(Holding):
    """Calls the entries of a list."""

    def forward(self, x: Tensor) -> Any:
        for operation in self.content:
            x = operation(x)
        return self.inner(x)


class InItsClass(Holding):
    """Calls what its class has."""

    table: ClassVar[Any] = {"shift": Shift()}

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.table["shift"](x))


class ByAnIndex(Holding):
    """Takes an entry of an object."""

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.content[x])


class Deep(Holding):
    """Reads an attribute of an object of an object."""

    def forward(self, x: Tensor) -> Any:
        return self.inner(x * self.content.a.b.c.d.e.value)


class Makes(Holding):
    """Makes an object whose class reads a global."""

    def forward(self, x: Tensor) -> Any:
        return self.inner(Scaled(x).x)


class Hidden(Holding):
    """Calls a module that is not registered."""

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.content[0](x))


def nested(value: float) -> SimpleNamespace:
    result = SimpleNamespace(value=value)
    for name in "edcba":
        result = SimpleNamespace(**{name: result})
    return result


def set_shift(model: Any) -> None:
    globals()["shift"] += 1


def set_value(model: Any) -> None:
    model.content.a.b.c.d.e.value += 1


def evaluate(model: Any) -> None:
    model.content[0].eval()


@pytest.mark.parametrize(
    ("kind", "content", "change"),
    [
        (InAnObject, lambda: SimpleNamespace(function=shifted), set_shift),
        (InAnObject, lambda: SimpleNamespace(function=Shift()), set_shift),
        (InAnObject, lambda: SimpleNamespace(function=Shift().__call__), set_shift),
        (InAList, lambda: [Shift()], set_shift),
        (InAList, lambda: (shifted,), set_shift),
        (InAList, lambda: {shifted}, set_shift),
        (InItsClass, lambda: None, set_shift),
        (ByAnIndex, Shift, set_shift),
        (Deep, lambda: nested(1.0), set_value),
        (Makes, lambda: None, set_shift),
        (Hidden, lambda: [nn.Dropout(0.5)], evaluate),
    ],
)
def test_what_held_objects_read_is_read(
    kind: type[Holding], content: Callable[[], Any], change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "shift", 0.5)
    model = kind(content())
    before = fingerprint(model)
    assert fingerprint(model) == before
    monkeypatch.setitem(globals(), "offset", 7.0)  # which only ``__repr__`` reads
    assert fingerprint(model) == before
    change(model)
    assert fingerprint(model) != before


def test_what_a_function_reads_that_has_been_exchanged_in_a_list_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "offset", 0.25)
    model = InAList([shifted])
    first = fingerprint(model)
    model.content[0] = moved
    second = fingerprint(model)
    assert second != first
    monkeypatch.setitem(globals(), "offset", 3.0)
    assert fingerprint(model) != second
    model.content[0] = shifted
    assert fingerprint(model) == first  # which no longer depends on the other global


def test_a_function_is_not_taken_for_one_that_has_its_address() -> None:
    model = InAnObject(SimpleNamespace())
    prints = set()
    for number in range(20):
        model.content.function = eval(f"lambda x: x * {number}")
        prints.add(fingerprint(model))
    assert len(prints) == 20


def test_a_name_that_a_class_gets_later_is_read() -> None:
    class Base(Holding):
        scale = 1.0

        def forward(self, x: Tensor) -> Any:
            return self.inner(x) * self.scale

    class Derived(Base):
        pass

    model = Derived(None)
    before = fingerprint(model)
    Derived.scale = 2.0
    assert fingerprint(model) != before


@pytest.mark.parametrize(("old", "new"), [(-1, -2), (1, True), (1, 1.0), ("a", "b")])
def test_an_entry_of_a_large_list_is_read(old: Any, new: Any) -> None:
    model = InAList([old] * 2000)
    before = fingerprint(model)
    model.content[1000] = new
    assert fingerprint(model) != before


def test_objects_in_a_circle_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "shift", 0.5)
    first, second = SimpleNamespace(), SimpleNamespace(function=shifted)
    first.function, second.content = second, first
    model = InAnObject(first)
    before = fingerprint(model)
    assert fingerprint(model) == before
    set_shift(model)
    assert fingerprint(model) != before


def test_an_object_of_which_nothing_is_read_does_not_count() -> None:
    model = InAnObject(SimpleNamespace(function=shifted, steps=0))
    before = fingerprint(model)
    model.content.steps += 1
    assert fingerprint(model) == before

"""User-defined containers that forbid changes or compare in a special way are unchanged after a capture."""

from __future__ import annotations

import enum
import types
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque

import pytest
import torch
from support.models.trace import Toy, vectors
from torch import nn

from autopipe.trace import capture
from autopipe.trace.record.containers import copied, refill, same
from autopipe.trace.record.model_snapshot import ModelSnapshot


class FrozenDict(OrderedDict):
    """Cannot be changed after it is built, as in diffusers/configuration_utils.py."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__frozen = True

    def _refuse(self, *args, **kwargs):
        raise Exception(f"You cannot change a {type(self).__name__} instance.")

    __delitem__ = setdefault = pop = update = clear = copy = _refuse

    def __setitem__(self, name, value):
        if hasattr(self, "_FrozenDict__frozen"):
            raise Exception("You cannot use ``__setitem__``")
        super().__setitem__(name, value)


class Truthless(list):
    def __eq__(self, other):
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")

    __hash__ = None
    clear = extend = copy = __bool__ = __eq__


@pytest.mark.parametrize(
    ("container", "change"),
    [
        (FrozenDict(a=1, b=2), lambda c: OrderedDict.__setitem__(c, "a", 3)),
        (OrderedDict(a=1, b=2), lambda c: c.move_to_end("a")),
        (Truthless([torch.ones(2)]), lambda c: list.append(c, torch.ones(2))),
        (defaultdict(list, a=[]), lambda c: c["b"]),
        (Counter("aab"), lambda c: c.update("b")),
        ({1, 2}, lambda c: c.discard(1)),
        ([1, 2], lambda c: c.reverse()),
        (deque([1, 2], maxlen=2), lambda c: c.append(3)),
        ({}, lambda c: c.update(a=1)),
    ],
)
def test_the_content_of_a_changed_container_is_restored(container, change):
    before = copied(container)
    assert same(container, before)
    change(container)
    assert not same(container, before)
    refill(container, before)
    assert same(container, before)


class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.settings = FrozenDict(width=8)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
        self.seen = []

    def forward(self, x):
        self.seen.append(x.shape[0])
        return self.layers(x).mean() * self.settings["width"]


def test_a_model_whose_settings_forbid_change_is_captured():
    model = Configured()
    capture(Toy(lambda: model, vectors), batch_size=4)
    assert dict(model.settings) == {"width": 8}
    assert model.seen == []


def test_an_unchanged_container_is_not_touched():
    model = Configured()
    snapshot = ModelSnapshot(model)
    model.seen.append(1)
    model.layers[0].extra = 2
    snapshot.restore()
    assert model.seen == []
    assert not hasattr(model.layers[0], "extra")


def refusing(base, *methods):
    """Return a subclass each of whose named methods raises."""

    def refuse(self, *args, **kwargs):
        raise RuntimeError("not allowed")

    return type(f"Refusing{base.__name__}", (base,), {**dict.fromkeys(methods, refuse), "__hash__": None})


class Proxy:
    """Raises an error other than AttributeError for unknown attributes."""

    def __getattribute__(self, name):
        if name == "__class__":
            return Proxy
        raise RuntimeError(f"no {name}")


class Frozen:
    def __init__(self):
        vars(self)["width"] = [8]

    def __setattr__(self, name, value):
        raise RuntimeError("frozen")

    __delattr__ = __setattr__


class FrozenType(type):
    def __setattr__(cls, name, value):
        raise RuntimeError("frozen")


READING = ("__iter__", "__len__", "__contains__", "__eq__", "__bool__", "copy")
GUARDED = {
    "dict": lambda: refusing(dict, *READING, "items", "keys", "values", "update", "clear")(a=[1]),
    "list": lambda: refusing(list, *READING, "__setitem__", "append", "clear", "extend")([1, [2]]),
    "set": lambda: refusing(set, *READING, "update", "clear")({1}),
    "tuple": lambda: refusing(tuple, *READING)((1, [2])),
    "deque": lambda: refusing(deque, *READING, "clear", "extend")([1]),
    "OrderedDict": lambda: FrozenDict(a=1),
    "UserDict": lambda: refusing(UserDict, "__getitem__", "__iter__")(),
    "ChainMap": lambda: ChainMap({"a": 1}, {"b": [2]}),
    "mappingproxy": lambda: types.MappingProxyType({"a": [1]}),
    "object": Proxy,
    "frozen object": Frozen,
    "frozen class": lambda: FrozenType("Constants", (), {"WIDTH": [8]}),
    "enumeration": lambda: enum.Enum("Kind", "A B"),
    "generator": lambda: (number for number in range(3)),
}


class Holding(nn.Module):
    def __init__(self, thing):
        super().__init__()
        self.thing, self.nested, self.deep = thing, {"x": thing}, [(thing,)]
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).mean()


@pytest.mark.parametrize("kind", GUARDED)
def test_a_model_may_hold_objects_that_refuse_to_be_read_or_changed(kind):
    model = Holding(GUARDED[kind]())
    capture(Toy(lambda: model, vectors), batch_size=4)
    assert model.nested["x"] is model.thing and model.deep[0][0] is model.thing

"""Containers of the user's that forbid change, or compare in their own way, survive a capture as they were."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict

import pytest
import torch
from torch import nn
from trace_cases import Toy, vectors

from autopipe.trace import capture
from autopipe.trace.borrowed import Snapshot
from autopipe.trace.containers import copied, refill, same


class FrozenDict(OrderedDict):
    """As diffusers/configuration_utils.py has it: no way to change it once it is made."""

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
        ({}, lambda c: c.update(a=1)),
    ],
)
def test_a_changed_container_gets_its_content_back(container, change):
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


def test_what_did_not_change_is_not_touched():
    model = Configured()
    snapshot = Snapshot(model)
    model.seen.append(1)
    model.layers[0].extra = 2
    snapshot.restore()
    assert model.seen == []
    assert not hasattr(model.layers[0], "extra")

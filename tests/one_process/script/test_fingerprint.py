"""What a forward may read: a change of it needs another recording, and a change of anything else must not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopipe.script.calls.fingerprint import fingerprint

weight, factor = 1.0, 2.0


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


def test_a_global_number_that_the_forward_names_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    before = fingerprint(model)
    monkeypatch.setitem(globals(), "factor", 3.0)
    assert fingerprint(model) != before

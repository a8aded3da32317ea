"""Decisions that depend on the data: refused, or kept with a guard."""

import pytest
import torch
import torch.nn.functional as F
from support.models.trace import Base, Toy, tokens, vectors
from torch import nn

from autopipe.errors import TraceError
from autopipe.trace import capture


class MaskShortcut(nn.Module):
    """Drops an all-ones mask unless it is being compiled, as transformers does."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 4)

    def forward(self, ids, mask):
        h = self.embed(ids)
        if not torch.compiler.is_compiling() and mask.all():
            return h.pow(2).mean()
        return (h * mask[..., None]).pow(2).sum() / mask.sum() / 4


def test_a_mask_of_ones_is_not_dropped():
    def batch(n, generator):
        item = tokens(n, generator)
        mask = torch.ones(n, 9)
        if n != 5:
            mask[:, 6:] = 0
        return {**item, "mask": mask}

    captured = capture(Toy(MaskShortcut, batch))
    assert any("mask" in node.inputs for node in captured.graph.nodes)


def test_a_read_of_the_data_is_refused_unless_allowed_with_a_guard():
    class Branch(Base):
        def forward(self, x):
            h = self.a(x)
            return h.mean() if x.max() > 100 else h.pow(2).mean()

    with pytest.raises(TraceError, match="depends on the numbers in the batch"):
        capture(Toy(Branch, vectors))
    captured = capture(Toy(Branch, vectors), allow_data_dependent=True)
    assert [n.target for n in captured.graph.nodes if "guards" in n.target] == ["autopipe.guards.expect"]


class ChosenByName(Base):
    """Looks up a layer by a name that contains a number read from the data."""

    def forward(self, x):
        layers = nn.ModuleDict({"layer_0": self.a, "layer_1": self.b})
        which = (x.sum() > 0).long()
        return layers[f"layer_{which}"](x).pow(2).mean()


def test_a_layer_chosen_by_a_name_from_the_data_has_a_guard():
    captured = capture(Toy(ChosenByName, vectors), allow_data_dependent=True)
    assert [node.target for node in captured.graph.nodes if "guards" in node.target] == ["autopipe.guards.expect"]


class Resized(Base):
    """Resizes to a size that depends on the data."""

    def forward(self, x):
        size = (x > 0).sum() + 1
        return F.interpolate(self.a(x)[:, None], size=[size], mode="nearest").pow(2).mean()


def test_a_size_that_depends_on_the_data_is_refused_with_its_line():
    with pytest.raises(TraceError, match="depends on the numbers in the batch") as caught:
        capture(Toy(Resized, vectors))
    assert "F.interpolate" in caught.value.where

"""Which values the members of a team have by position: only those that have the length of any batch."""

import pytest
import torch
from support.models.trace import Toy
from torch import nn
from torch.nn import functional

from autopipe.ir.teams.axis_sets import choose
from autopipe.trace import capture
from autopipe.trace.axes import find_axes
from autopipe.trace.teams import difference, member_of
from autopipe.trace.teams.positions import find_positions

WIDTH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        return x + self.b(functional.gelu(self.a(self.norm(x))))


class Truncated(nn.Module):
    """It reads the first 8 positions of any length."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.head = Block(), Block(), nn.Linear(WIDTH, 10)

    def forward(self, x, labels):
        y = self.first(x)
        y = self.last(y[:, :8] * 2.0)
        return functional.cross_entropy(self.head(y.mean(1)), labels)


def captured_of(build, length):
    def batch(n, generator):
        x = torch.randn(n, length, WIDTH, generator=generator)
        return {"x": x, "labels": torch.randint(0, 10, (n,), generator=generator)}

    toy = Toy(build, batch)
    captured = capture(toy, verify=False)
    return toy, captured, choose(captured.graph, find_axes(captured).axes, 2)


@pytest.mark.filterwarnings("default")
def test_a_slice_of_as_many_positions_as_the_captured_batch_has():
    """It is not the complete value of a longer batch, which a team that was captured with 8 positions runs, too."""
    _, captured, axes = captured_of(Truncated, 8)
    member = member_of(captured, axes, 2, sequence=True)
    assert [symbol.multiple for symbol in member.graph.symbols] == [1, 2]
    for length in (8, 12):
        longer, _, _ = captured_of(Truncated, length)
        assert member.graph.symbols[1].holds(length)
        assert difference(captured, member, axes, longer.leaves(longer.example_item(3))) == ""


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("length", "divided"), [(2, False), (4, True)])
def test_a_member_has_two_positions_or_more(length, divided):
    class Net(Truncated):
        def forward(self, x, labels):
            return functional.cross_entropy(self.head(self.last(self.first(x)).mean(1)), labels)

    _, captured, axes = captured_of(Net, length)
    assert find_positions(captured, axes, 2).is_empty != divided
    if divided:
        symbol = member_of(captured, axes, 2, sequence=True).graph.symbols[1]
        assert [size for size in range(1, 9) if symbol.holds(size)] == [4, 6, 8]

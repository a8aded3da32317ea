"""Numbers that a forward reads from its own tensors: constants are accepted, all others are refused."""

import pytest
import torch
from support.models.trace import Toy, vectors
from torch import nn

from autopipe.errors import TraceError
from autopipe.trace import capture


def no_zero(x):
    std = torch.as_tensor([0.5, 0.2, 0.1, 0.3], dtype=x.dtype)
    if (std == 0).any():  # as in normalize of torchvision
        raise ValueError("std is 0")
    return x / std.view(-1, 4)


def rates(x):
    for rate in torch.linspace(0, 0.3, 4):
        x = x * (1 - rate.item())
    return x


def flags(x):
    mask = torch.tensor([True, False])
    return x * 2 if mask.any() and not mask.all() else x


def numbers(x):
    scale = float(torch.tensor([1.0, 2.0]).sum()) + int(torch.arange(5).max())
    return x * scale + sum(torch.tensor([1, 2]).tolist())


def size_decides(x):
    return x * 2 if (torch.arange(x.shape[0]) > 3).any() else x


def size_beyond_both(x):
    return x * 2 if (torch.arange(x.shape[0]) > 1_000_000).any() else x


def draw_decides(x):
    return x * 2 if torch.rand(3).sum() > 1.5 else x


def input_decides(x):
    sums = torch.ones(3)
    sums[0] = x.sum().detach()
    return x * 2 if sums.sum() > 3 else x


def changed_in_place(x):
    sums = torch.zeros(3)
    total = sums + 1
    sums.add_(x.sum().detach())
    return x * 2 if (sums + total).sum() > 3 else x


class Reading(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read

    def forward(self, x):
        return self.read(self.layer(x)).pow(2).mean()


@pytest.mark.parametrize("read", [no_zero, rates, flags, numbers])
def test_a_number_that_does_not_depend_on_a_batch_is_accepted(read):
    traced = capture(Toy(lambda: Reading(read), vectors), batch_size=4)
    assert traced.method == "calls of the model, at two batch sizes"
    targets = [str(node.target) for node in traced.graph.nodes]
    assert not any(name in target for name in ("item", "linspace", "guards") for target in targets)


@pytest.mark.parametrize("read", [size_decides, size_beyond_both, draw_decides, input_decides, changed_in_place])
def test_a_number_that_depends_on_a_batch_or_a_draw_is_refused(read):
    with pytest.raises(TraceError, match=r"depends on the numbers in the batch|random numbers"):
        capture(Toy(lambda: Reading(read), vectors), batch_size=4)


TRANSFORMS = {
    "Normalize": lambda t: t.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
    "Compose": lambda t: t.Compose([t.Resize(12), t.CenterCrop(8), t.Normalize((0.5,) * 3, (0.2,) * 3)]),
    "Resize": lambda t: t.Resize((6, 6), antialias=True),
    "Grayscale": lambda t: t.Grayscale(3),
    "functional": lambda t: lambda x: t.functional.normalize(t.functional.hflip(x), [0.5] * 3, [0.2] * 3),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torchvision_are_recorded(name):
    transforms = pytest.importorskip("torchvision.transforms")

    class Seeing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 2, 1)
            self.transform = TRANSFORMS[name](transforms)

        def forward(self, x):
            return self.last(self.transform(self.first(x))).pow(2).mean()

    def images(n, generator):
        return {"x": torch.rand(n, 3, 10, 10, generator=generator)}

    traced = capture(Toy(Seeing, images), batch_size=4)
    assert not any(node.num_random for node in traced.graph.nodes) and not traced.notes

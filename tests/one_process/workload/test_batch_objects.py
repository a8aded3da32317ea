"""Objects in a batch: dataclasses, named tuples, classes with attributes or slots, subclasses of containers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models.workload import MODEL
from support.oracle import train as plain
from support.pipelines import build, captured_file, minibatches, plan_for

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = {
    "dataclass": "@dataclass\nclass Images:\n    tensors: Any\n    mask: Any\n    note: str = 'x'\n",
    "frozen dataclass with slots": (
        "@dataclass(frozen=True, slots=True)\nclass Images:\n    tensors: Any\n    mask: Any\n"
    ),
    "named tuple": "class Images(NamedTuple):\n    tensors: Any\n    mask: Any\n",
    "subclass of a named tuple": (
        "class Pair(NamedTuple):\n    tensors: Any\n    mask: Any\nclass Images(Pair):\n    pass\n"
    ),
    "class that is not called again": (
        "class Images:\n    def __init__(self, tensors, mask):\n"
        "        self.tensors, self.parts = tensors, {'mask': [mask, None]}\n"
        "        type(self).made = getattr(type(self), 'made', 0) + 1\n"
        "    @property\n    def mask(self):\n        return self.parts['mask'][0]\n"
    ),
    "slots": (
        "class Images:\n    __slots__ = ('tensors', 'mask')\n"
        "    def __init__(self, tensors, mask):\n        self.tensors, self.mask = tensors, mask\n"
    ),
    "subclass of dict": (
        "class Images(dict):\n    def __init__(self, tensors, mask):\n"
        "        super().__init__(tensors=tensors)\n        self.mask = mask\n"
        "    @property\n    def tensors(self):\n        return self['tensors']\n"
    ),
    "object in an object": (
        "class Mask:\n    def __init__(self, mask):\n        self.mask = mask\n"
        "@dataclass\nclass Images:\n    tensors: Any\n    inner: Any\n"
        "    @property\n    def mask(self):\n        return self.inner.mask\n"
    ),
}
TEXT = """
import torch
from torch import nn
from dataclasses import dataclass
from typing import Any, NamedTuple

%(kind)s

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)
    def forward(self, images):
        assert type(images).__name__ in ("Images", "SimpleNamespace")
        h = torch.relu(self.first(images.tensors)) * images.mask
        return self.last(torch.tanh(self.second(h)))

build_model = Net
loss = nn.CrossEntropyLoss

def data(batch_size=6):
    g = torch.Generator().manual_seed(1)
    for _ in range(4):
        mask = torch.rand(batch_size, 12, generator=g)
        x, y = torch.randn(batch_size, 6, generator=g), torch.randint(0, 3, (batch_size,), generator=g)
        yield (Images(x, %(mask)s),), y
"""


def cut(item: Any, parts: int) -> list[Any]:
    """Cut a batch by attribute."""
    ((images,), target) = item
    pieces = zip(*(t.tensor_split(parts) for t in (images.tensors, images.mask, target)), strict=True)
    return [((SimpleNamespace(tensors=tensors, mask=mask),), labels) for tensors, mask, labels in pieces]


@pytest.mark.parametrize("kind", KINDS)
def test_stages_train_batches_of_objects_like_a_plain_loop(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "objects.py"
    path.write_text(TEXT % {"kind": KINDS[kind], "mask": "Mask(mask)" if kind == "object in an object" else "mask"})
    subject = captured_file(path)
    reader = "one" if kind == "dataclass" else "each"
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 3, 6), tmp_path / "run", data_reader=reader)
    items = minibatches(subject.workload, 3, 6, last=5)
    weights = pipeline.weights(pipeline.train(items))
    _, model, _ = plain(path, items, 3, divisor=lambda item: float(item[1].shape[0]), cut=cut)
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter), name


def test_leaves_of_an_object_are_named_by_argument_and_attribute(load: Any) -> None:
    workload = load(
        MODEL + "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
        "def data(n): return [(Pair(torch.zeros(n, 3), torch.zeros(n)), torch.zeros(n))]\n"
    )
    item = workload.example_item(4)
    assert list(workload.leaves(item)) == ["x_a", "x_b", "target"]
    assert type(workload.split(item, 2)[0][0]).__name__ == "Pair"


def test_an_object_without_tensors_is_a_value(load: Any) -> None:
    workload = load(
        MODEL + "class Note:\n    def __init__(self): self.text = 'x'\n"
        "def data(batch_size): return [((torch.zeros(batch_size, 3), Note()), torch.zeros(batch_size, 2))]\n"
    )
    item = workload.example_item(4)
    assert workload.split(item, 2)[0][0][1] is item[0][1]

"""Batches whose sizes differ every time, as in graphs and detection: one further recording serves all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracle import load as imported
from support.oracle import train as plain
from support.pipelines import build, plan_for, profile_of

from autopipe.trace import capture
from autopipe.workload import LoadOptions, load_workload
from autopipe.workload.cutting.dimensions import Minibatch

pytestmark = pytest.mark.usefixtures("one_thread")

# graphs of 3 to 8 nodes and any number of edges; every microbatch has two graphs
GRAPHS = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 3)
    def forward(self, nodes, edges, owner):
        x = self.first(nodes)
        for layer in self.layers:
            x = torch.relu(layer(x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])))
        return self.head(x.new_zeros(2, 16).index_add(0, owner, x))

build_model = Net

def graph(g):
    count = int(torch.randint(3, 9, (), generator=g))
    return torch.randn(count, 6, generator=g), torch.randint(count, (2, int(torch.randint(1, 20, (), generator=g))),
                                                              generator=g)

def pack(graphs, target):
    sizes = [len(nodes) for nodes, _ in graphs]
    starts = [0, sizes[0]]
    edges = torch.cat([each + start for (_, each), start in zip(graphs, starts)], 1)
    owner = torch.repeat_interleave(torch.arange(2), torch.tensor(sizes))
    return (torch.cat([nodes for nodes, _ in graphs]), edges, owner), target

def data():
    g = torch.Generator().manual_seed(0)
    for _ in range(6):
        graphs = [graph(g) for _ in range(4)]
        target = torch.randint(0, 3, (4,), generator=g)
        yield [pack(graphs[:2], target[:2]), pack(graphs[2:], target[2:])], target

def split(batch, parts):
    return batch[0]

def loss(output, target):
    return F.cross_entropy(output, target)
"""
# images of one size, each with 0 to 4 boxes
BOXES = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(3))
        self.head = nn.Linear(8, 4)
    def forward(self, images):
        x = torch.stack(images)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x.mean((2, 3)))

build_model = Net

def data(batch_size=4):
    g = torch.Generator().manual_seed(0)
    for step in range(6):
        counts = torch.randint(1, 5, (batch_size,), generator=g).tolist()
        counts[step % batch_size] *= int(step != 3)
        images = [torch.randn(3, 8, 8, generator=g) for _ in counts]
        yield (images,), [dict(boxes=torch.rand(count, 4, generator=g)) for count in counts]

def loss(output, target):
    boxes = [entry["boxes"] for entry in target]
    rows = torch.cat([row.expand(len(each), 4) for row, each in zip(output, boxes)])
    return (rows - torch.cat(boxes).view(rows.shape[0], 4)).abs().sum(1).mean()
"""


@pytest.mark.parametrize(
    ("text", "cut", "most"),
    [
        (GRAPHS, None, 1),
        # the image without a box is a size that stays fixed
        (BOXES, lambda item, parts: [((item[0][0][i : i + 2],), item[1][i : i + 2]) for i in (0, 2)], 3),
    ],
    ids=["graphs", "boxes"],
)
def test_sizes_that_differ_in_every_batch_need_one_further_recording(
    text: str, cut: Any, most: int, tmp_path: Path
) -> None:
    path = tmp_path / "model.py"
    path.write_text(text)
    workload = load_workload(LoadOptions(str(path)))
    workload.batches.minibatch = Minibatch(2, 4 if cut else None)
    subject = profile_of(workload, capture(workload))
    plan = plan_for(subject, 2, "1f1b", 2, 4)
    pipeline = build(subject, plan, tmp_path / "run")
    items = list(workload.items(None))
    weights = pipeline.weights(pipeline.train(items))
    folders = [folder for folder in pipeline.run.stages.iterdir() if folder.is_dir()]
    assert 1 <= len(folders) <= most
    _, model, _ = plain(path, items, 2, divisor=lambda item: len(item[1]), cut=cut or imported(path).split)
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter), name

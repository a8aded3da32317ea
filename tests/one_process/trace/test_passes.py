"""How often a capture runs the complete model on numbers: the rest of it is on fake tensors."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe.trace import capture
from autopipe.workload import LoadOptions, load_workload

WIDTH, LENGTH, BLOCKS = 8, 32, 3
MODEL = f"""
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, {WIDTH}), nn.Embedding({LENGTH}, {WIDTH})
        self.blocks = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({BLOCKS})))

    def forward(self, ids):
        return self.blocks(self.tokens(ids) + self.positions(torch.arange(ids.shape[1])))

def build_model():
    return Net()

def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten() % {WIDTH})

def data(batch_size=4):
    g = torch.Generator().manual_seed(1)
    for _ in range(3):
        ids = torch.randint(50, (batch_size, {LENGTH} + 1), generator=g)
        yield ids[:, :-1], ids[:, 1:]
"""


class _Products(TorchDispatchMode):
    """Counts the products of real matrices by their rows: the positions of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: Counter[int] = Counter()
        self.num_backward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and not isinstance(args[0], FakeTensor):
            rows = args[0].shape[0]
            if torch._C._current_graph_task_id() >= 0:
                self.num_backward += 1
            else:
                self.forward[rows] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("one_thread")
def test_a_capture_differentiates_two_short_batches_and_no_complete_one(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    with _Products() as products:
        graph = capture(load_workload(LoadOptions(str(path)))).graph
    assert graph.lengths, "lengths may vary"
    complete = {rows: count // BLOCKS for rows, count in products.forward.items() if rows >= LENGTH}
    # the search for state runs two samples twice; the loss of three samples is compared at the complete length
    assert sum(rows * count for rows, count in complete.items()) <= (2 * 2 + 3 + 3) * LENGTH, products.forward
    short = sum(count for rows, count in products.forward.items() if rows < LENGTH) // BLOCKS
    assert short <= 3, products.forward
    # of the batch of the model and of the two parts of the graph: the products for weights and for inputs
    assert 0 < products.num_backward <= 3 * (2 * BLOCKS), products.num_backward

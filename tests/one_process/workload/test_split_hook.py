"""Batches that are not cut along a dimension: graphs, the ``split`` hook, lists of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.graphs import NET, SPLIT
from support.models.workload import MODEL, fails
from support.oracle import load as imported
from support.oracle import train as plain
from support.pipelines import Captured, build, minibatches, plan_for, profile_of
from support.plain_scripts import compared, is_equal

from autopipe.errors import RunError
from autopipe.runtime.batches.unseen_forms import OneBatch
from autopipe.trace import capture
from autopipe.workload import LoadOptions, load_workload
from autopipe.workload.cutting.dimensions import Minibatch

pytestmark = pytest.mark.usefixtures("one_thread")

GRAPHS = (
    NET
    + """
def data():
    g = torch.Generator().manual_seed(0)
    for step in range(5):
        graphs = 7 if step else 6
        edges = torch.cat([torch.randint(0, NODES, (2, 5), generator=g) + NODES * i for i in range(graphs)], 1)
        target = torch.randint(0, 3, (NODES * graphs,), generator=g)
        target[torch.rand(target.shape, generator=g) < 0.3] = -100
        yield (torch.randn(NODES * graphs, 6, generator=g), edges), target

evaluate_data = data
loss = nn.CrossEntropyLoss
"""
)
IMAGES = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(48, 16), nn.Linear(16, 5)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
    def forward(self, images):
        tokens = [image.unfold(1, 4, 4).unfold(2, 4, 4).permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)
                  for image in images]
        x = self.embed(torch.cat(tokens))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(torch.stack([part.mean(0) for part in x.split([len(t) for t in tokens])]))

build_model = Net

def data(batch_size=6):
    g = torch.Generator().manual_seed(0)
    sizes = [(8, 8), (4, 8), (4, 8)]
    for _ in range(3):
        images = [torch.randn(3, *sizes[i % 3], generator=g) for i in range(batch_size)]
        yield (images,), [dict(label=torch.randint(0, 5, (1,), generator=g)) for _ in range(batch_size)]

def loss(output, target):
    return F.cross_entropy(output, torch.cat([entry["label"] for entry in target]))
"""


def subject_of(path: Path, text: str, parts: int, batch_size: int | None = None) -> Captured:
    path.write_text(text)
    workload = load_workload(LoadOptions(str(path)))
    workload.batches.minibatch = Minibatch(parts, batch_size)
    return profile_of(workload, capture(workload))


def counted(item: Any) -> float:
    return float((item[1] != -100).sum())


def assert_trained(subject: Captured, plan: Any, folder: Path, reader: str, cut: Any, divisor: Any, **job: Any) -> None:
    pipeline = build(subject, plan, folder / "run", data_reader=reader, **job)
    items = list(subject.workload.items(None))[:4]
    weights = pipeline.weights(pipeline.train(items))
    stale = (lambda name: 1) if plan.schedule == "2bw" else (lambda name: 0)
    path = Path(subject.workload.files[0])
    _, model, _ = plain(path, items, plan.num_microbatches, staleness=stale, divisor=divisor, cut=cut)
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter), name


# --- the split hook ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "reader"), [("1f1b", "each"), ("2bw", "one")])
def test_the_hook_cuts_a_batch_of_graphs(tmp_path: Path, schedule: str, reader: str) -> None:
    path = tmp_path / "graphs.py"
    subject = subject_of(path, GRAPHS + SPLIT, 3)
    assert subject.capture.graph.symbols == ()
    plan = plan_for(subject, 2, schedule, 3, 28)
    hook = imported(path).split
    assert_trained(subject, plan, tmp_path, reader, hook, counted, evaluate_every=2)


def test_the_written_loop_calls_the_hook(tmp_path: Path) -> None:
    subject = subject_of(tmp_path / "graphs.py", GRAPHS + SPLIT, 3)
    assert is_equal(compared(subject, plan_for(subject, 2, "1f1b", 3, 28), 4, tmp_path))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return batch[0]", "returned a Tensor"),
        ("return []", "returned 0 batches, and 2 were requested"),
        ("return [batch] * (parts + 1)", "returned 3 batches, and 2 were requested"),
        ("return [batch[0]]", "part 0 gave a Tensor; expected (inputs, target) or a dict"),
        ("return 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_hook_that_returns_something_else_is_refused(load: Any, body: str, message: str) -> None:
    data = "def data(): return [(torch.zeros(4, 3), torch.zeros(4, 2))]\n"
    workload = load(MODEL + data + f"def split(batch, parts):\n    {body}\n")
    error = fails(lambda: workload.split(next(workload.items(None)), 2))
    assert message in error.what


@pytest.mark.parametrize(
    "other", ["from torch import split", "def split(x, fraction):\n    return x[: int(len(x) * fraction)]"]
)
def test_another_function_named_split_is_not_a_hook(load: Any, other: str) -> None:
    workload = load(MODEL + f"{other}\ndef data(): return [(torch.zeros(4, 3), torch.zeros(4, 2))]\n")
    assert "split" not in workload.hooks
    assert len(workload.split(next(workload.items(None)), 2)) == 2


def test_with_a_hook_the_graph_holds_for_every_size(tmp_path: Path) -> None:
    hook = """
def split(batch, parts):
    return list(zip(*(tensor.flip(0).tensor_split(parts) for tensor in batch)))

def data(n):
    return [(torch.arange(3.0 * n).view(n, 3), torch.ones(n, 2))] * 3
"""
    subject = subject_of(tmp_path / "sized.py", MODEL + hook, 3, 6)
    assert [symbol.name for symbol in subject.capture.graph.symbols] == ["s0"]
    parts = subject.workload.split(next(subject.workload.items(6)), 3)
    assert parts[0][0][0].tolist() == [15.0, 16.0, 17.0]


# --- whole batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", ["each", "one"])
def test_a_whole_graph_is_one_microbatch(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "graphs.py"
    path.write_text(GRAPHS)
    workload = load_workload(LoadOptions(str(path)))
    workload.batches.minibatch = Minibatch()
    workload.batches.train_whole()
    subject = profile_of(workload, capture(workload))
    plan = plan_for(subject, 2, "1f1b", 1, 24)
    assert_trained(subject, plan, tmp_path, reader, lambda item, parts: [item], counted)
    assert is_equal(compared(subject, plan, 3, tmp_path))
    assert "cannot be cut into 2 microbatches" in fails(lambda: workload.split(next(workload.items(None)), 2)).what


def test_a_batch_that_is_not_samples_first_may_be_one_microbatch(load: Any) -> None:
    workload = load(MODEL + "def data(batch_size): return [(torch.zeros(9, 3), torch.zeros(9, 2))]\n")
    workload.batches.minibatch = Minibatch(1, 4)
    (part,) = workload.split(next(workload.items(4)), 1)
    assert part[0].shape == (9, 3)
    assert workload.spec.batch_dims == {"": -1}


# --- lists of samples -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", ["each", "one"])
def test_a_list_of_images_is_cut_entry_by_entry(tmp_path: Path, reader: str) -> None:
    subject = subject_of(tmp_path / "images.py", IMAGES, 3, 6)
    assert subject.workload.spec.batch_dims == {"inputs[0]": -2, "target": -2}

    def cut(item: Any, parts: int) -> list[Any]:
        (images,), target = item
        return [((images[i : i + 2],), target[i : i + 2]) for i in range(0, len(images), 2)]

    plan = plan_for(subject, 2, "1f1b", 3, 6)
    assert_trained(subject, plan, tmp_path, reader, cut, lambda item: len(item[1]), max_shapes=4)
    with pytest.raises(RunError, match="lists of images"):
        compared(subject, plan, 1, tmp_path / "plain")


def test_lists_are_resized_and_cut_into_uneven_parts(tmp_path: Path) -> None:
    (tmp_path / "images.py").write_text(IMAGES)
    workload = load_workload(LoadOptions(str(tmp_path / "images.py")))
    item = next(workload.items(7))
    assert [workload.num_samples(part) for part in workload.split(item, 3)] == [3, 2, 2]
    assert workload.num_samples(workload.resized(item, 9)) == 9
    assert minibatches(workload, 1, 7, last=2)[0][0][0][1].shape == (3, 4, 8)


def test_a_part_is_captured_as_it_is_although_data_takes_a_batch_size(load: Any) -> None:
    workload = load(
        MODEL
        + "def data(batch_size=6): return [(torch.ones(batch_size, 3), torch.ones(2 * batch_size, 2))]\n"
        + "def loss(output, target): return output.sum() + target.sum()\n"
        + "def split(batch, parts): return [(x, t) for x, t in zip(batch[0].split(3), batch[1].split(6))]\n"
    )
    part = workload.split(workload.example_item(6), 2)[1]
    assert OneBatch(workload, part).example_item(5) is part

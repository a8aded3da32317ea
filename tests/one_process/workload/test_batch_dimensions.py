"""Batches whose samples are not in dimension 0: found by requesting another batch size, or declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.workload import MODEL, fails
from support.oracle import train as plain
from support.pipelines import build, captured_file, minibatches, plan_for
from support.plain_scripts import compared, is_equal

from autopipe.trace import capture
from autopipe.workload import LoadOptions, Workload, load_workload
from autopipe.workload.cutting.dimensions import BatchDimensions

pytestmark = pytest.mark.usefixtures("one_thread")

SEQUENCE_FIRST = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(20, 8), nn.LSTM(8, 8, 2)
        self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 20)
    def forward(self, ids, hidden, table):
        h = self.lstm(self.embed(ids), hidden)[0]
        return self.head(torch.tanh(self.middle(h)) * table)

build_model = Net

def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for step in range(5):
        ids = torch.randint(0, 20, (%(length)s, batch_size), generator=g)
        target = ids[1:].masked_fill(torch.rand(ids[1:].shape, generator=g) < 0.3, -100)
        hidden = torch.randn(2, batch_size, 8, generator=g), torch.zeros(2, batch_size, 8)
        yield (ids[:-1], hidden, torch.ones(8)), target

evaluate_data = data
"""


def cut(item: Any, parts: int) -> list[Any]:
    """Cut a batch of the model above, as its user would."""
    (ids, (h, c), table), target = item
    pieces = [tensor.tensor_split(parts, dim=1) for tensor in (ids, h, c, target)]
    return [((i, (a, b), table), t) for i, a, b, t in zip(*pieces, strict=True)]


def counted_targets(item: Any) -> int:
    return int((item[1] != -100).sum())


def sequence_first(folder: Path, length: str = "9") -> Path:
    path = folder / "sequence_first.py"
    path.write_text(SEQUENCE_FIRST % {"length": length})
    return path


def workload_of(path: Path) -> Workload:
    return load_workload(LoadOptions(str(path)))


# --- which dimension --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", ["3", "6", "9", "12"])
def test_the_dimension_that_changes_with_the_batch_size_is_found(tmp_path: Path, length: str) -> None:
    workload = workload_of(sequence_first(tmp_path, length))
    item = workload.example_item(5)
    assert workload.batch_dims(item) == {"ids": 1, "hidden_0": 1, "hidden_1": 1, "target": 1}
    parts = workload.split(next(workload.items(7)), 3)
    assert [workload.num_samples(part) for part in parts] == [3, 2, 2]
    assert all(part[0][2].shape == (8,) for part in parts)
    assert workload.num_samples(workload.resized(item, 12)) == 12


def test_two_dimensions_that_follow_the_batch_size_are_refused(tmp_path: Path) -> None:
    workload = workload_of(sequence_first(tmp_path, "batch_size + 1"))
    error = fails(lambda: workload.example_item(5))
    assert "dimensions 0 and 1 of inputs[0] are both as large as the batch" in error.what
    assert "batch_dim" in error.remedy


def test_plain_batches_are_not_requested_twice(load: Any) -> None:
    workload = load(
        MODEL + "asked = []\ndef data(batch_size):\n    asked.append(batch_size)\n"
        "    return [(torch.zeros(batch_size, 3), torch.zeros(batch_size, 2))]\n"
    )
    workload.example_item(6)
    assert workload.hooks["data"].function.__globals__["asked"] == [6]
    assert workload.spec.batch_dims == {}


def test_the_dimensions_are_sent_to_other_processes(tmp_path: Path) -> None:
    first = workload_of(sequence_first(tmp_path))
    first.example_item(5)
    second = Workload.from_spec(first.spec)
    assert second.num_samples(next(second.items(9))) == 9


def test_a_table_as_long_as_a_batch_is_not_cut(load: Any) -> None:
    workload = load(
        MODEL + "def data(batch_size):\n"
        "    return [((torch.zeros(batch_size, 3), torch.zeros(4, 2)), torch.zeros(batch_size, 2))]\n"
    )
    next(workload.items(6))
    assert [part[0][1].shape[0] for part in workload.split(next(workload.items(4)), 2)] == [4, 4]


def test_short_data_is_not_asked_for_more_samples_than_it_has(load: Any) -> None:
    text = (
        MODEL + "def data(batch_size):\n    n = min(batch_size, 6)\n    return [(torch.zeros(4, n), torch.zeros(n))]\n"
    )
    workload = load(text)
    assert workload.num_samples(next(workload.items(8))) == 6
    assert workload.spec.batch_dims == {"inputs": 1, "target": 0}


# --- batch_dim --------------------------------------------------------------------------------------------------------

BATCH = "((torch.zeros(7, 4), torch.zeros(4, 2), torch.zeros(4)), torch.zeros(7, 4))"


@pytest.mark.parametrize("declaration", ["((1, 0, None), 1)", "[[1, 0, None], 1]"])
def test_batch_dim_declares_the_dimension_of_data_of_fixed_size(load: Any, declaration: str) -> None:
    workload = load(MODEL + f"batch_dim = {declaration}\ndef data(): return [{BATCH}]\n")
    (part, _) = workload.split(next(workload.items(None)), 2)
    assert [tuple(leaf.shape) for leaf in part[0]] == [(7, 2), (2, 2), (4,)]
    assert part[1].shape == (7, 2)


def test_batch_dim_may_be_a_dict_of_the_exceptions(load: Any) -> None:
    workload = load(
        MODEL + "batch_dim = {'ids': 1, 'states': 2}\n"
        "def data(): return [dict(ids=torch.zeros(7, 4), states=(torch.zeros(1, 2, 4),), labels=torch.zeros(4))]\n"
    )
    part = workload.split(next(workload.items(None)), 4)[0]
    assert part["ids"].shape == (7, 1) and part["states"][0].shape == (1, 2, 1) and part["labels"].shape == (1,)


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ("'first'", "batch_dim of net_of_batches.py has 'first'"),
        ("-1", "has -1"),
        ("(0, 1, 2)", "has 3 entries"),
        ("(0, True)", "has True at target"),
        ("1", "batch_dim is 1 for inputs[2], which has 1 dimension"),
        ("(0, 1)", "inputs[1] has 4 samples in dimension 0, and others have 7"),
    ],
)
def test_an_impossible_batch_dim_is_refused(load: Any, declaration: str, message: str) -> None:
    error = fails(lambda: next(load(MODEL + f"batch_dim = {declaration}\ndef data(): return [{BATCH}]\n").items(None)))
    assert message in error.what and error.remedy


def test_a_batch_that_cannot_be_cut_names_batch_dim(load: Any) -> None:
    workload = load(MODEL + "def data(): return [(torch.zeros(7, 4, 3), torch.zeros(4))]\n")
    assert "batch_dim" in fails(lambda: next(workload.items(None))).remedy


LATER = "\n_data = data\ndef data():\n    return _data(8)\n"


@pytest.mark.parametrize("length", ["9", "10"])
def test_sequences_with_samples_in_dimension_one_are_not_cut(length: str, tmp_path: Path) -> None:
    """Length 9: as many steps as samples. ``data`` takes no batch size, so only the gradients can decide."""
    path = sequence_first(tmp_path, length)
    text = path.read_text().replace("< 0.3", "< 0").replace("torch.ones(8)", "torch.ones(1)")  # no target is masked
    path.write_text(text + LATER)
    error = fails(lambda: capture(workload_of(path)))
    assert "dimension 1 counts the samples" in error.what and "batch_dim = 1" in error.remedy
    declared = "batch_dim = ((1, 1, None), 1)\n"
    for way_out in (declared, "batch_dim = ((0, None, None), 0)\n"):
        path.write_text(text + LATER + way_out)
        capture(workload_of(path))


# --- equality ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "reader"), [("1f1b", "each"), ("1f1b", "one"), ("2bw", "one")])
def test_stages_train_sequence_first_batches_like_a_plain_loop(tmp_path: Path, schedule: str, reader: str) -> None:
    path = sequence_first(tmp_path)
    subject = captured_file(path)
    assert next((s.input, s.dimension) for s in subject.capture.graph.symbols) == ("ids", 1)
    plan = plan_for(subject, 2, schedule, 3, 7)
    pipeline = build(subject, plan, tmp_path / "run", data_reader=reader)
    items = minibatches(subject.workload, 4, 7, last=5)
    weights = pipeline.weights(pipeline.train(items))
    stale = (lambda name: 1) if schedule == "2bw" else (lambda name: 0)
    _, model, _ = plain(path, items, 3, staleness=stale, divisor=counted_targets, cut=cut)
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter), name


def test_the_written_loop_cuts_along_the_same_dimension(tmp_path: Path) -> None:
    subject = captured_file(sequence_first(tmp_path))
    assert is_equal(compared(subject, plan_for(subject, 2, "1f1b", 3, 7), 3, tmp_path))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_other_captures_use_the_same_dimension(tmp_path: Path) -> None:
    path = tmp_path / "scripted.py"
    path.write_text(
        MODEL.replace("return self.layer(x)", "return scripted(self.layer(x.transpose(0, 1)))").replace(
            "class Net", "@torch.jit.script\ndef scripted(x):\n    return x * 2\n\nclass Net"
        )
        + "def data(batch_size): return [(torch.ones(4, batch_size, 3), torch.ones(batch_size, 4, 2))]\n"
    )
    graph = capture(workload_of(path)).graph
    assert (graph.symbols[0].input, graph.symbols[0].dimension) == ("x", 1)
    assert graph.inputs[1].spec.shape[0] == "s0"


def test_a_new_tensor_with_samples_in_another_dimension_is_refused(load: Any) -> None:
    workload = load(
        MODEL + "batch_dim = {'ids': 1}\n"
        "def data(): return [dict(ids=torch.zeros(7, 4)), dict(ids=torch.zeros(7, 4), more=torch.zeros(7, 4))]\n"
    )
    error = fails(lambda: list(workload.items(None)))
    assert "the dimension of ['more'] that counts the 4 samples is not known" in error.what
    assert "batch_dim" in error.remedy


@pytest.mark.parametrize("layout", ["torch.jagged", "torch.strided"])
@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
def test_nested_tensors_are_refused_by_name(load: Any, layout: str) -> None:
    nested = f"torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout={layout})"
    error = fails(lambda: next(load(MODEL + f"def data(): return [({nested}, torch.zeros(2))]\n").items(None)))
    assert "gave a nested tensor at inputs" in error.what and "to_padded_tensor" in error.remedy


def test_the_default_is_dimension_zero() -> None:
    assert BatchDimensions().of((torch.zeros(3, 2), torch.tensor(1.0))) == {0: 0}

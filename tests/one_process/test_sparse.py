"""Sparse tensors of a model: trained, saved and exported, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import oracle
from support.models.sparse import MODEL
from support.models.trace import Toy, vectors
from support.models.weights import begun
from support.pipelines import build, captured_file, minibatches, plan_for

from autopipe import sparse
from autopipe.commands.exporting import export
from autopipe.commands.settings import ExportSettings
from autopipe.errors import RunError, TraceError
from autopipe.measure import measure
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.trace import capture
from autopipe.verify.check import compare
from autopipe.verify.comparison import Worst

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def dense(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([[0, 1, 0, 2], [0, 0, 0, 0], [3, 0, 0, 0], [0, 0, 4, 0]]).to(dtype)


TENSORS = {
    "coo": lambda: dense().to_sparse(),
    "bool": lambda: dense(torch.bool).to_sparse(),
    "double entries": lambda: torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2)),
    "no entries": lambda: torch.zeros(3, 4).to_sparse(),
    "hybrid": lambda: torch.rand(2, 3, 4).to_sparse(2),
    "csr": lambda: dense().to_sparse_csr(),
    "csc": lambda: dense(torch.float64).to_sparse_csc(),
    "bsr": lambda: dense().to_sparse_bsr(2),
    "bsc": lambda: dense().to_sparse_bsc(2),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_sparse_tensor_is_rebuilt_from_its_parts(kind: str) -> None:
    tensor = TENSORS[kind]()
    entries = sparse.encoded({"a.b": tensor, "c": torch.ones(2)})
    assert all(entry.layout is torch.strided for entry in entries.values())
    restored = sparse.assembled(entries)
    assert restored.keys() == {"a.b", "c"}
    assert sparse.equal(restored["a.b"], tensor) and torch.equal(restored["a.b"].to_dense(), tensor.to_dense())
    if tensor.layout is torch.sparse_coo:
        assert restored["a.b"].is_coalesced() == tensor.is_coalesced()
    assert not sparse.equal(tensor, tensor.to_dense())
    if tensor.dtype is not torch.bool and tensor._nnz():
        assert not sparse.equal(tensor, tensor * 2)


def test_parts_that_do_not_fit_are_refused() -> None:
    entries = sparse.encoded({"a": dense().to_sparse_csr()})
    entries["a@sparse_csr.col_indices"] = torch.tensor([1, 3, 0, 9])
    with pytest.raises(ValueError, match="are inconsistent"):
        sparse.assembled(entries)
    del entries["a@sparse_csr.values"]
    with pytest.raises(ValueError, match="are inconsistent"):
        sparse.assembled(entries)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sparse") / "net.py"
    path.write_text(MODEL)
    return path


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_sparse_buffers_are_saved_and_exported(model_file: Path, tmp_path: Path, schedule: str) -> None:
    subject = captured_file(model_file)
    plan = plan_for(subject, 3, schedule, 4, 8)
    pipeline = build(subject, plan, tmp_path / "run", save=True, checkpoint_every=1)
    items = minibatches(subject.workload, 3, 8)
    weights = pipeline.weights(pipeline.train(items))
    delta = oracle.by_owner([s.parameters for s in plan.stages], [int(schedule == "2bw")] * 3)
    _, model, _ = oracle.train(model_file, items, 4, staleness=delta)
    expected = dict(model.named_parameters()) | dict(model.named_buffers())
    assert [name for name, tensor in expected.items() if not sparse.equal(weights[name], tensor)] == []

    checkpoint = Checkpoint.latest(pipeline.run.checkpoints)
    assert checkpoint is not None
    checkpoint.verify()
    assert checkpoint.shapes()["model.mixing"] == checkpoint.shapes()["model.shift"] == (8, 8)
    read = checkpoint.read(["model.mixing", "model.shift", "model.heads"])
    assert all(sparse.equal(tensor, expected[name.removeprefix("model.")]) for name, tensor in read.items())

    export(ExportSettings(tmp_path / "x.pt", run=pipeline.run.path))
    untouched = subject.workload.build_model()
    untouched.load_state_dict(torch.load(tmp_path / "x.pt", weights_only=True), strict=True)
    assert all(sparse.equal(tensor, expected[name]) for name, tensor in untouched.state_dict().items())
    for output in ("x.safetensors", "folder"):
        with pytest.raises(RunError, match="mixing is a sparse tensor") as refused:
            export(ExportSettings(tmp_path / output, run=pipeline.run.path))
        assert ".pt" in refused.value.remedy and not (tmp_path / output).exists()
    for weights_from in (tmp_path / "x.pt", checkpoint.directory):
        started = begun(pipeline, weights_from)
        assert [name for name, tensor in expected.items() if not sparse.equal(started[name], tensor)] == []


def test_sparse_buffers_are_compared(model_file: Path, tmp_path: Path) -> None:
    subject = captured_file(model_file)
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 2, 8), tmp_path / "run")
    items = minibatches(subject.workload, 2, 8)

    result = compare(subject.workload, pipeline.run, pipeline.job, pipeline.context, items, draws=False)
    assert {"mixing", "shift", "heads"} <= {difference.name for difference in result.differences}
    assert all(difference.bitwise for difference in result.differences)
    worst = Worst()
    assert worst.add("mixing", dense().to_sparse_csr(), dense().to_sparse_csr()) == 0.0
    assert worst.add("shift", dense().to_sparse(), (dense() * 2).to_sparse()) == 0.5
    assert worst.unequal == {"shift"}


def test_calls_with_sparse_tensors_are_measured(model_file: Path) -> None:
    subject = captured_file(model_file)
    profile = measure(subject.capture, subject.workload, device="cpu", microbatch_sizes=(2,))
    assert {node.name for node in subject.capture.graph.nodes} == profile.measurements[0].costs.keys()


class Sparse(torch.nn.Module):
    """``kind``: how the forward uses a sparse tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = torch.nn.Linear(4, 4)
        table = torch.eye(4).to_sparse()
        if kind == "parameter":
            self.table = torch.nn.Parameter(table)
        else:
            self.register_buffer("table", table)

    def forward(self, x):
        x = self.first(x)
        if self.kind == "changes":
            with torch.no_grad():
                self.table.mul_(0.9)
        if self.kind == "binds":
            self.table = self.table * 0.9
        if self.kind == "indices":
            return x.mean() + self.table.indices().sum() * 0.1
        return torch.sparse.mm(self.table, x.t()).mean()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("parameter", "parameter table is sparse"),
        ("changes", "changes a sparse tensor in place"),
        ("binds", "buffer table is sparse, and the forward binds it to a new tensor"),
        ("indices", "its number of entries depends on its values"),
    ],
)
def test_unsupported_uses_of_sparse_tensors_are_refused(kind: str, message: str) -> None:
    with pytest.raises(TraceError, match=message) as refused:
        capture(Toy(lambda: Sparse(kind), vectors), batch_size=6)
    assert refused.value.remedy

"""One step of a run, recomputed by the plain loop from the files of the run: equal, or the tensor that differs."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.pipelines import Captured, Pipeline, build, captured, captured_file, minibatches, plan_for
from support.schedule_cases import laid_out

from autopipe.commands.training import auditing
from autopipe.ir import artifact
from autopipe.ir.plan import Plan
from autopipe.runtime.audit import batch
from autopipe.runtime.audit.files import DIFFERENT, EQUAL, LEFT_OUT, AuditFiles, AuditResult
from autopipe.runtime.checkpoint.manifest import Manifest
from autopipe.runtime.checkpoint.snapshot import Snapshot
from autopipe.runtime.events import Silent
from autopipe.runtime.job import RunDirectory
from autopipe.runtime.step.loss_weights import Divisors
from autopipe.verify.plain_step import audit, is_in_place
from autopipe.workload.batches.digests import chained, digest_of

STEPS, EVERY = 8, 3
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.drop(self.norm(x)))

def build_model():
    return Net()

def loss(output, target):
    return F.cross_entropy(output, target)

def optimizer(named_parameters):
    return torch.optim.AdamW([p for _, p in named_parameters], lr=0.02, weight_decay=0.1)

def scheduler(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

def data(batch_size=8):
    g = torch.Generator().manual_seed(3)
    x = lambda: torch.randn(6, batch_size, generator=g).t()
    return [(x(), torch.randint(0, 5, (batch_size,), generator=g)) for _ in range(10)]

def example_inputs(batch_size):
    return data(batch_size)[0]
"""


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    path = tmp_path_factory.mktemp("model") / "net.py"
    path.write_text(MODEL)
    return captured_file(path)


def audited(subject: Captured, plan: Plan, folder: Path, **job: Any) -> tuple[Pipeline, dict[int, float]]:
    """Train with audits; return the losses by minibatch."""
    pipeline = build(subject, plan, folder, **{"audit_every": EVERY, **job})
    pipeline.run.write_job(pipeline.job)
    sessions = pipeline.train(minibatches(subject.workload, STEPS, plan.batch_size))
    return pipeline, sessions[0].executor.stepper.losses


def results(pipeline: Pipeline, losses: dict[int, float]) -> list[AuditResult]:
    return [audit(pipeline.run.path, step, losses[step]) for step in range(EVERY, STEPS, EVERY)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "2bw", "pipedream"])
def test_every_schedule_is_equal_bit_for_bit(schedule: str, subject: Captured, tmp_path: Path) -> None:
    plan = plan_for(subject, 3, schedule, 4, 8)
    pipeline, losses = audited(subject, plan, tmp_path, clip_grad_norm=0.5 if schedule == "1f1b" else 0.0)
    audits = results(pipeline, losses)
    assert [result.step for result in audits] == [3, 6]
    for result in audits:
        assert (result.status, result.bitwise, result.differing) == (EQUAL, True, 0), result
        assert result.tensors == len(subject.capture.graph.parameters) + len(subject.capture.graph.buffers)


def test_an_audit_changes_nothing(subject: Captured, tmp_path: Path) -> None:
    plan = plan_for(subject, 2, "pipedream", 1, 8)
    items = minibatches(subject.workload, STEPS, 8)
    kept = [
        pipeline.weights(pipeline.train(items))
        for pipeline in (build(subject, plan, tmp_path / "a"), build(subject, plan, tmp_path / "b", audit_every=EVERY))
    ]
    for name, tensor in kept[0].items():
        assert torch.equal(kept[1][name], tensor), name


@pytest.mark.parametrize(
    ("model", "schedule", "ranks", "job"),
    [
        ("resnet", "1f1b", ((0, 1), (2,)), {}),
        ("resnet", "2bw", ((0, 1), (2,)), {}),
        ("resnet", "1f1b", ((0,), (1,)), {"deferred_batch_norm": True}),
        ("gpt", "2bw", ((0,), (1,)), {}),
    ],
    ids=["replicas", "stale replicas", "deferred batch norm", "a large tie"],
)
def test_sums_in_another_order_are_compared_in_that_order(
    model: str, schedule: str, ranks: tuple[tuple[int, ...], ...], job: dict[str, Any], tmp_path: Path
) -> None:
    subject = captured(model)
    plan = laid_out(plan_for(subject, 2, "1f1b", 4, 12), schedule, ranks)
    plan = replace(plan, ties=tuple(replace(tie, exact=False) for tie in plan.ties))
    assert bool(plan.ties) == (model == "gpt")
    pipeline, losses = audited(subject, plan, tmp_path, **job)
    for result in results(pipeline, losses):
        assert result.status == EQUAL, result
        assert result.bitwise, result


def edited(files: AuditFiles, stage: int, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change what a run has after an audited step, with matching digests."""
    path = files.checkpoint_after / "manifest.json"
    manifest = artifact.load(Manifest, path, renew="-")
    entries = list(manifest.files)
    file = files.checkpoint_after / entries[stage].file
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    size = file.stat().st_size
    entries[stage] = replace(entries[stage], sha256=sha256, bytes=size, tensors=tuple(sorted(tensors)))
    artifact.save(replace(manifest, files=tuple(entries)), path)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
def test_a_state_of_the_optimizer_that_differs_is_named(name: str, subject: Captured, tmp_path: Path) -> None:
    pipeline, losses = audited(subject, plan_for(subject, 2, "1f1b", 4, 8), tmp_path)
    path = f"optimizer.state[layers.0.bias]['{name}']"
    edited(AuditFiles(tmp_path, 3), 0, lambda tensors: tensors[path].mul_(1.001))
    result = audit(pipeline.run.path, 3, losses[3])
    assert (result.status, result.name, result.stage, result.differing) == (DIFFERENT, path, 0, 1)
    assert result.error == pytest.approx(1e-3, rel=1e-3)


def test_averages_are_compared(subject: Captured, tmp_path: Path) -> None:
    pipeline, losses = audited(subject, plan_for(subject, 2, "2bw", 4, 8), tmp_path, ema=0.9)
    edited(AuditFiles(tmp_path, 6), 1, lambda tensors: tensors["average.head.bias"].mul_(1.001))
    first, second = results(pipeline, losses)
    assert first.status == EQUAL and first.bitwise
    assert (second.status, second.name) == (DIFFERENT, "average.head.bias")


def test_a_tensor_that_differs_is_named_with_its_stage(subject: Captured, tmp_path: Path) -> None:
    pipeline, losses = audited(subject, plan_for(subject, 2, "1f1b", 4, 8), tmp_path)
    name = "layers.3.weight"

    def flip(tensors: dict[str, torch.Tensor]) -> None:  # the last bit of one number
        flat = tensors[f"model.{name}"].view(-1)
        flat[0] = torch.nextafter(flat[0], torch.tensor(9.0))

    edited(AuditFiles(tmp_path, 3), 1, flip)
    first, second = results(pipeline, losses)
    assert (first.status, first.name, first.stage, first.differing) == (DIFFERENT, name, 1, 1)
    assert 0 < first.error < 1e-6
    assert second.status == EQUAL
    assert audit(tmp_path, 6, losses[6] + 1e-3).status == DIFFERENT  # the loss is compared, too


def test_a_missing_parameter_differs(subject: Captured, tmp_path: Path) -> None:
    pipeline, losses = audited(subject, plan_for(subject, 2, "1f1b", 4, 8), tmp_path)
    edited(AuditFiles(tmp_path, 3), 0, lambda tensors: tensors.pop("model.layers.0.bias"))
    result = audit(pipeline.run.path, 3, losses[3])
    assert (result.status, result.name, result.differing) == (DIFFERENT, "layers.0.bias", 1)


def test_an_audit_that_does_not_fit_into_memory_is_skipped(
    subject: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, losses = audited(subject, plan_for(subject, 2, "1f1b", 4, 8), tmp_path)
    monkeypatch.setattr("autopipe.verify.plain_step._free_bytes", lambda device: 1000)
    result = audit(pipeline.run.path, 3, losses[3])
    assert result.status == LEFT_OUT
    assert "1000 are free" in result.reason


def test_a_step_that_is_not_finite_proves_nothing(subject: Captured, tmp_path: Path) -> None:
    items = minibatches(subject.workload, STEPS, 8)
    items[3] = (items[3][0] * float("nan"), items[3][1])
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 4, 8), tmp_path, audit_every=EVERY, on_nonfinite="skip")
    sessions = pipeline.train(items)
    result = audit(tmp_path, 3, sessions[0].executor.stepper.losses[3])
    assert (result.status, result.reason) == (LEFT_OUT, "the step is not finite, and proves nothing")


def test_a_minibatch_is_stored_and_loaded_unchanged(tmp_path: Path) -> None:
    wide = torch.arange(24.0).view(4, 6)
    item = {
        "a": wide.t(),
        "gaps": wide[:, :5],
        "none": None,
        "nested": [(torch.tensor(3), 1.5), "text", True],
        "c": torch.randn(2, dtype=torch.complex64),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
    }
    divisors = Divisors([9], [[3], [6]], False)
    batch.store(item, divisors, tmp_path / "batch")
    minibatch, stored = batch.load(tmp_path / "batch")
    assert stored == divisors
    assert list(minibatch) == list(item)
    for name in ("a", "gaps", "c", "empty"):
        assert torch.equal(minibatch[name], item[name]), name
        assert minibatch[name].dtype == item[name].dtype
    assert minibatch["a"].stride() == item["a"].stride()
    assert not minibatch["gaps"].is_contiguous()
    assert (minibatch["none"], minibatch["nested"][1:]) == (None, ["text", True])
    assert type(minibatch["nested"][0]) is tuple and torch.equal(minibatch["nested"][0][0], torch.tensor(3))


@pytest.mark.parametrize("value", [OrderedDict(a=1), {1.5: 2}, object(), itertools.count()], ids=lambda v: type(v))
def test_a_minibatch_that_cannot_be_stored_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(batch.UnstorableBatchError, match="it contains a "):
        batch.store((torch.zeros(2), value), None, tmp_path / "batch")
    assert not (tmp_path / "batch").exists()


class Kept(Silent):
    """Keeps events."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))


@pytest.mark.parametrize("storable", [True, False])
def test_rank_0_reports_written_and_skipped_audits(
    storable: bool, subject: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(item: Any, factors: list[float], folder: Path) -> None:
        raise batch.UnstorableBatchError("it contains a handle")

    if not storable:
        monkeypatch.setattr(batch, "store", refuse)
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 4, 8), tmp_path, audit_every=EVERY)
    reporters = [Kept(), Kept()]
    sessions = pipeline.train(minibatches(subject.workload, STEPS, 8), reporters=reporters)
    losses = sessions[0].executor.stepper.losses
    assert len(losses) == STEPS
    events = [(kind, fields) for kind, fields in reporters[0].events if kind.startswith("audit")]
    if storable:
        assert events == [("audit", {"step": step, "loss": losses[step]}) for step in (0, 3, 6)]
    else:
        assert events == [("audit-left-out", {"reason": "its minibatch cannot be stored: it contains a handle"})] * 3
        assert not any(path.is_dir() for path in (tmp_path / "audits").iterdir())
    assert not any(kind.startswith("audit") for kind, _ in reporters[1].events)


def test_rank_0_does_not_wait_for_a_rank_that_failed_to_write(
    subject: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 4, 8), tmp_path, audit_every=EVERY)
    write = Snapshot.write

    def full(snapshot: Snapshot, path: Path, *given: Any, **named: Any) -> Any:
        if path.name.startswith("stage-1"):
            raise OSError(28, "No space left on device")
        return write(snapshot, path, *given, **named)

    monkeypatch.setattr(Snapshot, "write", full)
    reporters = [Kept(), Kept()]
    start = time.monotonic()
    pipeline.train(minibatches(subject.workload, STEPS, 8), reporters=reporters)
    assert time.monotonic() - start < 120
    reasons = [fields["reason"] for kind, fields in reporters[0].events if kind == "audit-left-out"]
    assert reasons == ["it cannot be written: the checkpoint of stage 1 cannot be written: No space left on device"] * 3
    assert not any(kind == "audit" for kind, _ in reporters[0].events)
    assert not any(path.suffix == ".after" for path in (tmp_path / "audits").iterdir())


def hang(task: Any, link: Any) -> None:
    time.sleep(3600)


def test_a_hanging_comparison_is_ended_and_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditing, "compare_for_run", hang)
    monkeypatch.setattr(auditing.Auditor, "_edited", lambda self: "")
    notes: list[str] = []
    auditor = auditing.Auditor(
        RunDirectory(tmp_path), lambda kind, fields: notes.append(fields["text"]), pytest.fail, most_seconds=1.0
    )
    files = AuditFiles(tmp_path, 3)
    files.after.mkdir(parents=True)
    auditor.add(3, 1.0)
    worker = auditor._worker
    assert worker is not None
    auditor.finish(lambda: False)
    assert not worker.process.is_alive()
    assert notes == [f"an audit is skipped: its process did not end within 1 s; see {tmp_path / 'logs' / 'audit.log'}"]
    assert not files.after.exists()


@pytest.mark.parametrize(
    ("place", "item", "is_there"),
    [
        ((0, 0), 0, True),
        ((0, 2), 2, True),
        ((0, 3), 0, True),
        ((1, 0), 0, True),
        ((1, 3), 0, True),
        ((0, 3), 1, False),
        ((0, 2), 0, False),
        ((0, 4), 0, False),
    ],
)
def test_the_place_after_an_epoch_is_the_beginning_of_the_next(place: Any, item: int, is_there: bool) -> None:
    minibatches = [torch.full((2,), float(number)) for number in range(3)]

    class Data:
        def items(self, batch_size: int | None, epoch: int) -> list[torch.Tensor]:
            return minibatches

    epoch, position = place
    data = b""
    for minibatch in minibatches[:position]:
        data = chained(data, digest_of(minibatch))
    before = Manifest(7, epoch, position, 0, "", "", (), data=data.hex())
    first = digest_of(minibatches[0]).hex()
    assert is_in_place(Data(), 0, first, before, minibatches[item]) == is_there  # type: ignore[arg-type]

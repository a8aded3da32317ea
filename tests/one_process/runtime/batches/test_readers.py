"""The same batch for every rank: rank 0 reads and sends, or each rank reads and compares. Ranks are threads."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracle import train as plain
from support.pipelines import Captured, Pipeline, build, captured, captured_file, minibatches, plan_for
from support.schedule_cases import Case
from torch.utils import _pytree as pytree

from autopipe.errors import AutopipeError, RunError, WorkerError
from autopipe.ir.plan import Plan
from autopipe.runtime.batches.source import Place, Source
from autopipe.runtime.events import Silent
from autopipe.runtime.session import RankSession
from autopipe.runtime.transport.threads import run_in_threads
from autopipe.workload.batches.items import kept

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = Path(__file__).resolve().parents[3] / "shape_models"
Epochs = Callable[[int], Iterator[Any]]

MIXED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 24), nn.Linear(24, 24)
        self.table, self.last = nn.Embedding(9, 24), nn.Linear(24, 5)
    def forward(self, x, mask, index, scale):
        h = torch.tanh(self.first(x)) * mask
        h = torch.tanh(self.second(h)) + self.table(index)
        return self.last(h * scale)

def build_model():
    return Net()

def loss(output, target):
    return nn.functional.cross_entropy(output, target["class"]) + (output.mean(1) - target["mean"]).pow(2).mean()

def data(batch_size=6):
    g = torch.Generator().manual_seed(3)
    for _ in range(5):
        x = torch.randn(6, batch_size, generator=g).t()          # not contiguous
        mask = torch.rand(batch_size, 24, generator=g) > 0.3
        index = torch.randint(0, 9, (batch_size,), generator=g)
        scale = torch.rand(1, 24, generator=g)                   # of the whole batch
        mean = torch.randn(batch_size, generator=g)
        yield (x, mask, index, scale), {"class": torch.randint(0, 5, (batch_size,), generator=g), "mean": mean}
"""

KINDS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)
        self.third, self.last = nn.Linear(16, 16), nn.Linear(16, 1)
    def forward(self, x, turned, brain, eighth, count, flag, learned, empty, picture):
        h = torch.tanh(self.first(x))
        h = torch.tanh(self.second(h)) + picture.mean((1, 2))
        h = torch.tanh(self.third(h)) * flag + learned + empty.sum(1, keepdim=True)
        h = h + turned.real - turned.imag + brain.float() + eighth.float() + count.to(torch.float32) * 0.01
        return self.last(torch.tanh(h)).squeeze(1)

def build_model():
    return Net()

def loss(output, target):
    return (output - target).pow(2).mean()

def data(batch_size=12):
    g = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(batch_size, 8, generator=g)
        r = torch.randn(batch_size, 16, generator=g)
        turned = torch.complex(r, r * 2).conj()
        small = r.bfloat16(), r.to(torch.float8_e4m3fn), (r.abs() * 9).to(torch.uint16), r > 0
        picture = torch.randn(batch_size, 16, 3, 4, generator=g).permute(0, 2, 3, 1)  # not contiguous
        yield (x, turned, *small, (r * 0.1).requires_grad_(True), r[:, :0], picture), x.sum(1)
"""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    file = tmp_path_factory.mktemp("mixed") / "mixed.py"
    file.write_text(MIXED)
    return captured_file(file)


def trained(pipeline: Pipeline, items: Sequence[Any], **job: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    sessions = replace(pipeline, job=replace(pipeline.job, **job)).train(items)
    losses = sessions[0].executor.stepper.losses
    return pipeline.weights(sessions), [losses[step] for step in range(len(items))]


def assert_one_reader_is_as_good(pipeline: Pipeline, items: Sequence[Any], file: Path, parts: int) -> None:
    weights, losses = trained(pipeline, items)
    expected, model, _ = plain(file, items, parts)
    assert losses == expected
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter), name


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_one_reader_sends_every_kind_of_leaf_to_its_stages(mixed: Captured, tmp_path: Path, stages: int) -> None:
    pipeline = build(mixed, plan_for(mixed, stages, "1f1b", 4, 6), tmp_path / "run")
    items = minibatches(mixed.workload, 5, 6, last=3)
    weights, losses = trained(pipeline, items, data_reader="each")
    sent, same = trained(pipeline, items)
    assert same == losses
    assert all(torch.equal(sent[name], weights[name]) for name in weights)


@pytest.mark.parametrize("replicas", [(1, 1), (1, 2), (3,)])
def test_leaves_of_every_type_arrive_with_their_bits(tmp_path: Path, replicas: tuple[int, ...]) -> None:
    file = tmp_path / "kinds.py"
    file.write_text(KINDS)
    subject = captured_file(file)
    pipeline = build(subject, Case("1f1b", "kinds", replicas, "8").plan(subject), tmp_path / "run")
    items = minibatches(subject.workload, 3, 12, last=11)
    each, one = trained(pipeline, items, data_reader="each"), trained(pipeline, items)
    assert one[1] == each[1]
    assert all(torch.equal(one[0][name], each[0][name]) for name in each[0])


@pytest.mark.parametrize("name", ["conv", "lstm"])
def test_one_reader_captures_further_shapes(tmp_path: Path, name: str) -> None:
    subject = captured_file(SHAPES / f"{name}.py")
    pipeline = build(subject, plan_for(subject, 3, "1f1b", 3, 6), tmp_path)
    assert_one_reader_is_as_good(pipeline, list(subject.workload.items(6)), SHAPES / f"{name}.py", 3)


def planned(schedule: str, replicas: tuple[int, ...]) -> tuple[Captured, Plan]:
    subject = captured("gpt")
    return subject, Case(schedule, "gpt", replicas, "8").plan(subject)


@pytest.mark.parametrize(("schedule", "replicas"), [("2bw", (1, 1)), ("1f1b", (2, 1)), ("gpipe", (3,))])
def test_one_reader_and_each_reader_train_equally(tmp_path: Path, schedule: str, replicas: tuple[int, ...]) -> None:
    subject, plan = planned(schedule, replicas)
    items = minibatches(subject.workload, 7, 6, last=5)
    each = trained(build(subject, plan, tmp_path / "each"), items, data_reader="each")
    one = trained(build(subject, plan, tmp_path / "one"), items)
    assert one[1] == each[1]
    assert all(torch.equal(one[0][name], each[0][name]) for name in each[0])


def test_the_other_ranks_wait_for_as_long_as_rank_0_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopipe.runtime.batches.readers._WAIT_SECONDS", 0.0)
    subject, plan = planned("2bw", (1, 1))
    pipeline = build(subject, plan, tmp_path)
    items = minibatches(subject.workload, 9, 6)

    def slowly(epoch: int) -> Iterator[Any]:
        for item in items:
            time.sleep(0.5)
            yield item

    # one window reads all of them before rank 1 gets the first
    job = replace(pipeline.job, steps=len(items))
    run_in_threads(pipeline.run, job, pipeline.context, RankSession.train, items=slowly, timeout_seconds=3.0)


class Evaluations(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def event(self, kind: str, **fields: Any) -> None:
        if kind == "evaluation":
            self.losses.append(fields["loss"])


@pytest.mark.parametrize("replicas", [(1, 1), (3,), (2, 1)])
def test_evaluation_is_equal_with_either_reader(tmp_path: Path, replicas: tuple[int, ...]) -> None:
    subject, plan = planned("1f1b", replicas)
    results = []
    for reader in ("each", "one"):
        pipeline = build(subject, plan, tmp_path / reader, evaluate_every=2, data_reader=reader)
        reporters = [Evaluations() for _ in range(plan.num_ranks)]
        pipeline.train(minibatches(subject.workload, 2, 6), reporters=reporters)
        results.append(reporters[0].losses)
    assert results[0] == results[1]
    assert len(results[0]) == 1


# -- ranks that read different data ------------------------------------------------------------------------------------


def run_with(pipeline: Pipeline, epochs: Sequence[Epochs], **job: Any) -> tuple[AutopipeError, list[RankSession]]:
    """Train with separate data for each rank; return the failure and the results of the ranks."""
    sessions: list[RankSession] = []

    def body(session: RankSession) -> None:
        session.items = epochs[session.transport.rank]
        sessions.append(session)
        session.train()

    with pytest.raises(AutopipeError) as caught:
        run_in_threads(pipeline.run, replace(pipeline.job, data_reader="each", **job), pipeline.context, body)
    return caught.value, sorted(sessions, key=lambda session: session.transport.rank)


def spoilt(items: Sequence[Any], index: int) -> list[Any]:
    """Return the minibatches with one number changed, which a single stage reads."""
    (x, mask, places, scale), target = items[index]
    places = places.clone()
    places[-1] = (places[-1] + 1) % 9
    return [*items[:index], ((x, mask, places, scale), target), *items[index + 1 :]]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pipedream", "2bw"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_different_minibatch_on_one_rank_ends_the_run_before_its_step(
    mixed: Captured, tmp_path: Path, schedule: str, rank: int
) -> None:
    plan = plan_for(mixed, 3, schedule, 4, 6)
    pipeline = build(mixed, plan, tmp_path / "run", epochs=0)
    items = minibatches(mixed.workload, 5, 6)
    epochs: list[Epochs] = [lambda epoch: iter(items)] * 3
    epochs[rank] = lambda epoch: iter(spoilt(items, 3))
    failure, sessions = run_with(pipeline, epochs, steps=5)
    assert isinstance(failure, WorkerError)
    assert failure.rank == rank
    assert f"rank {rank} read another minibatch for step 4 than rank" in failure.what
    assert "minibatch 3 of epoch 0" in failure.what
    assert "omit --data-reader each" in failure.remedy
    # one window of the asynchronous schedule holds all five minibatches, so no step is done
    steps = 3 if schedule in ("gpipe", "1f1b") else 0
    expected: dict[str, Any] = dict(mixed.workload.build_model().named_parameters())
    if steps:
        expected, _ = trained(build(mixed, plan, tmp_path / "plain", epochs=0), items[:steps])
    weights = {name: tensor for session in sessions for name, tensor in session.tensors().items()}
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_the_rank_that_differs_from_two_others_is_named_even_if_it_is_rank_0(mixed: Captured, tmp_path: Path) -> None:
    pipeline = build(mixed, plan_for(mixed, 3, "1f1b", 4, 6), tmp_path, epochs=0)
    items = minibatches(mixed.workload, 2, 6)
    epochs: list[Epochs] = [lambda epoch: iter(spoilt(items, 0)), lambda epoch: iter(items), lambda epoch: iter(items)]
    failure, _ = run_with(pipeline, epochs, steps=2)
    assert failure.what.startswith("rank 0 read another minibatch for step 1 than rank 1 did")


def test_data_that_ends_earlier_on_one_rank_is_an_error(tmp_path: Path) -> None:
    subject = captured("gpt")
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 4, 6), tmp_path, epochs=1)
    items = minibatches(subject.workload, 4, 6)
    failure, _ = run_with(pipeline, [lambda epoch: iter(items), lambda epoch: iter(items[:3])], steps=0)
    assert "rank 1 reached the end of the data for step 4, and rank 0 reached minibatch 3 of epoch 0" in failure.what


def test_a_new_shape_on_a_single_rank_ends_the_run(tmp_path: Path) -> None:
    subject = captured_file(SHAPES / "conv.py")
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 3, 6), tmp_path, epochs=0)
    items = list(subject.workload.items(6))
    shapes = [tuple(item[0].shape) for item in items]
    other = next(index for index, shape in enumerate(shapes) if shape != shapes[0])
    same = [items[0]] * 2
    failure, _ = run_with(pipeline, [lambda e: iter(same), lambda e: iter([items[0], items[other]])], steps=2)
    assert "rank 1 read another minibatch for step 2" in failure.what


# -- the position of the data ------------------------------------------------------------------------------------------


def numbers(*lengths: int) -> Epochs:
    return lambda epoch: iter([(torch.tensor([[float(100 * epoch + i)]]), None) for i in range(lengths[epoch])])


def values(source: Source, most: int) -> list[float]:
    return [float(taken.item[0]) for taken in source.read(0, most)]


def test_a_source_continues_at_its_position_and_into_the_next_epoch() -> None:
    whole = Source(numbers(3, 2, 3), "net", Silent(), epochs=3)
    places = [taken.place for taken in whole.read(0, 99)]
    expected = [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3)]
    assert [(place.epoch, place.position) for place in places] == expected
    everything = [0.0, 1.0, 2.0, 100.0, 101.0, 200.0, 201.0, 202.0]
    for count, replay in itertools.product(range(1, 8), ("some", "all")):
        source = Source(numbers(3, 2, 3), "net", Silent(), epochs=3, replay=replay)
        source.seek(places[count - 1])
        assert source.place == places[count - 1]
        assert values(source, 99) == everything[count:]


def test_a_minibatch_that_is_read_and_not_used_is_refused() -> None:
    place = Source(numbers(5, 2), "net", Silent()).read(0, 2)[-1].place
    for before, change in itertools.product(
        (Place(), place), (Source._next, lambda source: source._iterator.send(None))
    ):
        source = Source(numbers(5, 2), "net", Silent())
        source.seek(before)
        source.read(0, 1)
        change(source)
        with pytest.raises(RunError, match=rf"has given {before.position + 3} minibatches, and the run used"):
            source.read(1, 1)


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_a_counter_that_matters_later_is_restored_or_noted(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopipe.runtime.batches.source.REPLAY_SECONDS", seconds)

    def counting() -> Callable[[int], Iterator[Any]]:
        count = itertools.count(1)
        return lambda epoch: ((torch.full((1,), float(next(count) > 8)), torch.zeros(1)) for _ in range(4))

    class Notes(Silent):
        texts: tuple[str, ...] = ()

        def event(self, kind: str, **fields: Any) -> None:
            self.texts += (fields["text"],)

    whole = Source(counting(), "net", Silent(), epochs=3)
    place = whole.read(0, 5)[-1].place
    notes = Notes()
    resumed = Source(counting(), "net", notes, epochs=3, speaks=True)
    resumed.seek(place)
    equal = values(resumed, 99) == values(whole, 99)
    assert (equal, len(notes.texts)) == ((True, 0) if seconds else (False, 1))


def test_a_source_that_differs_before_its_position_is_refused() -> None:
    first = Source(numbers(3), "net", Silent())
    (*_, taken) = first.read(0, 2)
    other = Source(lambda epoch: iter([(torch.tensor([[9.0]]), None)] * 3), "net", Silent())
    with pytest.raises(Exception, match="the first 2 minibatches of epoch 0 differ"):
        other.seek(taken.place)
    other = Source(lambda epoch: iter([(torch.tensor([[9.0]]), None)] * 3), "net", Silent())
    other.seek(taken.place, compare=False)
    other = Source(lambda epoch: iter([(torch.tensor([[9.0]]), None)] * 3), "net", Silent())
    other.seek(Place(0, 2))  # a checkpoint without a digest
    assert values(other, 1) == [9.0]


@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_data_that_reuses_its_memory_trains_equally(mixed: Captured, tmp_path: Path, schedule: str) -> None:
    items = minibatches(mixed.workload, 5, 6)
    pipeline = build(mixed, plan_for(mixed, 2, schedule, 2, 6), tmp_path)
    expected = pipeline.weights(pipeline.train(items))

    def refilled(epoch: int) -> Iterator[Any]:
        memory = pytree.tree_map(torch.clone, items[0])
        for item in items:
            pytree.tree_map(torch.Tensor.copy_, memory, item)
            yield memory

    job = replace(pipeline.job, steps=len(items))
    sessions = run_in_threads(pipeline.run, job, pipeline.context, RankSession.train, items=refilled)
    weights = pipeline.weights(sessions)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "lay",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[1:, 2:7],
        lambda x: x[:, ::3],
        lambda x: x[:1].expand(5, -1),
        lambda x: x.flatten().unfold(0, 7, 2),
        lambda x: x[2, 3],
        lambda x: x[:0],
        lambda x: x[:, :1].expand(12, 2),
        lambda x: torch.complex(x, x).conj(),
        lambda x: x.to_sparse(),
    ],
)
def test_stored_minibatches_keep_their_strides(lay: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = lay(torch.arange(1200.0).view(12, 100)[:, :10])
    copy = kept({"x": [x]})["x"][0]
    dense = copy.to_dense() if copy.is_sparse else copy
    before = dense.clone()
    assert torch.equal(before, x.to_dense() if x.is_sparse else x)
    if not x.is_sparse:
        assert copy.stride() == x.stride()
        (x[:1] if x.dim() else x).fill_(-1)
    assert torch.equal(dense, before)

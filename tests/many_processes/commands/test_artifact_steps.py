"""``Pipeline.steps``: a loop of the caller trains as the plain loop does, and its ranks end with it."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from support import oracle

from autopipe import Pipeline
from autopipe.errors import ModelFileError, RunError, WorkerError
from autopipe.workers.fork_server import FORK_SERVER

pytestmark = pytest.mark.timeout(240)
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.drop = nn.Embedding(10, 16), nn.Dropout(0.2)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
    def forward(self, x, index):
        return self.last(self.drop(torch.relu(self.first(x)) + self.table(index)))

def build_model():
    return Net()

def loss(output, target):
    return (output - target).pow(2).mean()

def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.05, momentum=0.9)

def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
"""
Batch = tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank
    yield Pipeline(
        "model.py", gpus=2, num_microbatches=4, replicas="never", microbatch_sizes=(2,), threads_per_rank=1,
        device="cpu", schedule="1f1b",
    )  # fmt: skip
    torch.set_num_threads(threads)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("autopipe")]
    assert not ranks()


def ranks() -> list[psutil.Process]:
    """Return the processes that were forked from the fork server."""
    server = FORK_SERVER._forkserver_pid
    return [] if server is None else psutil.Process(server).children(recursive=True)


def minibatch(size: int = 8, seed: int = 0, scale: float = 1.0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    index = torch.randint(0, 10, (size,), generator=g)
    return (torch.randn(size, 8, generator=g) * scale, index), torch.randn(size, 1, generator=g)


def assert_equal(pipe: Pipeline, batches: list[Batch], losses: list[float]) -> None:
    """Assert that the weights are those of the plain loop over these batches, bit for bit, and so are the losses."""
    expected, model, _ = oracle.train(Path("model.py"), batches, 4)
    pipe.export("weights.safetensors")
    weights = load_file("weights.safetensors")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert losses == pytest.approx(expected, rel=1e-6)


def test_a_curriculum_trains_as_the_plain_loop_also_after_a_break(pipe: Pipeline) -> None:
    chosen: list[Batch] = []
    losses: list[float] = []

    def curriculum() -> Iterator[Batch]:
        for number in itertools.count():
            hard = bool(losses) and losses[-1] < 1.5
            chosen.append(minibatch(6 if number == 2 else 8, number, 3.0 if hard else 1.0))
            yield chosen[-1]

    steps = pipe.steps(curriculum(), run_dir="run")
    with pytest.raises(RunError, match="no result yet"):
        print(steps.result)
    for loss in steps:
        assert len(chosen) == loss.step + 1  # nothing is read ahead
        assert loss.learning_rate == 0.05 * 0.5 ** (loss.step // 2)
        losses.append(loss)
        if loss.step == 3:
            break
    assert len(chosen) == 4 and not ranks()
    assert Path(steps.result.checkpoint).name == "step-00000004"
    assert steps.result.losses == tuple(losses) and not steps.result.stopped
    assert_equal(pipe, chosen, losses)
    with pytest.raises(RunError, match="iterated before"):
        iter(steps)

    again = [minibatch(8, seed) for seed in (20, 21)]
    for loss in pipe.steps(iter(again), run_dir="run", resume=True):  # up to the end of the iterable
        losses.append(loss)
    assert len(losses) == 6 and losses[-1].step == 5  # type: ignore[attr-defined]  # a StepLoss
    assert_equal(pipe, chosen + again, losses)
    with pytest.raises(RunError, match=r"first minibatch of a loop over Pipeline\.steps"):
        Pipeline(gpus=2).train(steps=1)


def test_an_exception_ends_the_ranks_with_a_checkpoint(pipe: Pipeline) -> None:
    def broken() -> Iterator[Batch]:
        yield minibatch()
        yield minibatch(8, 1)
        raise LookupError("no more files")  # in the test

    options: dict[str, Any] = {"check": False, "audit_every": 0}
    steps, losses = pipe.steps(broken(), run_dir="first", **options), []
    with pytest.raises(LookupError, match="no more files"):
        for loss in steps:
            losses.append(loss)
    assert len(losses) == 2 and Path(steps.result.checkpoint).name == "step-00000002"
    assert_equal(pipe, [minibatch(), minibatch(8, 1)], losses)

    steps = pipe.steps(itertools.repeat(minibatch()), run_dir="second", **options)
    with pytest.raises(ZeroDivisionError):
        for loss in steps:
            print(1 / (loss.step - 1))
    assert Path(steps.result.checkpoint).name == "step-00000002" and not ranks()

    bad = minibatch()
    bad[0][1][6] = 99  # microbatch 3 of 4
    count = 0
    with pytest.raises(WorkerError, match="index out of range") as failed:
        for _ in pipe.steps([minibatch(), bad, minibatch()], run_dir="third", **options):
            count += 1
    assert count == 1 and failed.value.rank == 0 and not ranks()

    with pytest.raises(ModelFileError, match=r"set.*") as refused:
        for _ in pipe.steps([minibatch(), (({1, 2}, 3), 4)], run_dir="fourth", **options):
            pass
    assert refused.value.where == "minibatch 1 of the loop"

    def fails(kind: str, fields: Any) -> None:
        if kind == "step":
            raise KeyError("in on_event")

    with pytest.raises(KeyError, match="in on_event"):
        list(pipe.steps([minibatch(), minibatch()], run_dir="fifth", on_event=fails, **options))


def test_a_hook_ends_the_loop_and_a_schedule_that_reads_ahead_is_refused(pipe: Pipeline) -> None:
    steps = pipe.steps(
        itertools.repeat(minibatch()), check=False, on_step=lambda step, metrics: "stop" if step == 1 else None
    )
    count = sum(1 for _ in steps)
    assert count >= 2 and steps.result.steps == count and steps.result.stopped_by
    with pytest.raises(RunError, match="schedule 'pipedream' begins a minibatch before"):
        list(pipe.steps([minibatch()], schedule="pipedream", check=False))
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_loop_trains_teams(pipe: Pipeline) -> None:
    batches = [minibatch(seed=seed) for seed in range(3)]
    losses = [
        list(pipe.steps(batches, gpus=2, tensor_parallel=size, work_dir=f"teams-{size}", check=False))
        for size in (2, 1)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)

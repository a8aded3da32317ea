"""How often a step makes the host wait for the GPU: a fixed number, for any number of parameters and microbatches."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from support.fake_gpu import CUDA
from support.nccl.synchronizations import Synchronizations, counted
from torch import nn

from autopipe.ir.graph import Input, Number
from autopipe.ir.schedule import ScheduleSpec
from autopipe.runtime.batches.on_device import Placement
from autopipe.runtime.events import Silent
from autopipe.runtime.step.agreement import Agreement
from autopipe.runtime.step.deferred import DeferredStatistics
from autopipe.runtime.step.finite import FiniteBuffers, largest
from autopipe.runtime.step.gradients import GradientFinisher
from autopipe.runtime.step.losses import LossCollector
from autopipe.runtime.step.reduction import GradientSum
from autopipe.runtime.step.scalars import read_together
from autopipe.runtime.step.scaler import LossScaler
from autopipe.runtime.step.stepper import Stepper
from autopipe.runtime.step.ties import TieExchange
from autopipe.runtime.weights import WeightVersions
from autopipe.trace.numbers import spec_of


def test_the_counter_counts_what_waits() -> None:
    with counted() as waits:
        tensor = torch.ones(4, device=CUDA)
        assert waits.total == 0
        tensor.sum().item()
        tensor.cpu()
        torch.ones(2).to(CUDA)
        torch.ones(2).pin_memory().to(CUDA)  # the host waits for a copy that may be asynchronous, too
        assert dict(waits.counts) == {"_local_scalar_dense": 1, "to host": 1, "from pageable memory": 2}
        torch.ones(2).pin_memory().to(CUDA, non_blocking=True)
        assert waits.total == 4


def step(size: int, microbatches: int, staleness: int = 0, **options: Any) -> Synchronizations:
    """Return the count of one step of a rank with two stages of ``size`` layers each, of which one has the loss."""
    weighted, deferred = options.pop("weighted", False), options.pop("deferred", False)
    with counted() as waits:
        spec, runners = ScheduleSpec(((0,), (0,)), microbatches), {}
        for stage in range(2):
            layers: list[nn.Module] = [nn.Linear(4, 4, device=CUDA) for _ in range(size)]
            module = nn.Sequential(*layers, *(nn.BatchNorm1d(4, device=CUDA) for _ in range(size)))
            for name, parameter in list(module.named_parameters()):
                assert parameter.is_cuda, name
            losses: dict[Any, Any] = {}
            statistics = DeferredStatistics.of(module) if deferred else None
            runners[stage] = types.SimpleNamespace(
                versions=WeightVersions(module, staleness), losses=losses, deferred=statistics, stage=module
            )
        weight = torch.ones((), device=CUDA) if weighted else None
        runners[1].losses.update({(0, j): (torch.ones((), device=CUDA), weight) for j in range(microbatches)})
        transport: Any = types.SimpleNamespace(rank=0, world_size=1, leads=True)
        reporter = Silent()
        ties = TieExchange((), frozenset(), spec, runners, transport, reporter)
        loss = LossCollector(spec, runners, transport, reporter, weighted=weighted)
        names = [f"{stage}.{name}" for stage in runners for name in runners[stage].versions.masters]
        finisher = GradientFinisher(
            rank=0, request=spec, loss=loss, agreement=Agreement(transport, reporter), reporter=reporter,
            trainable=names, **options,
        )  # fmt: skip
        written = {s: [name for name, _ in runners[s].stage.named_buffers()] for s in runners}
        buffers = {s: FiniteBuffers(runners[s].stage, written[s]) for s in runners}
        stepper = Stepper(
            runners=runners, schedulers=dict.fromkeys(runners), ties=ties, replicas={}, gradients=finisher, loss=loss,
            reporter=reporter,
            optimizers={s: torch.optim.AdamW(list(runners[s].versions.masters.values())) for s in runners},
            finite_buffers=buffers if options["on_nonfinite"] == "skip" else {},
        )  # fmt: skip
        owned = TieExchange.owned
        ties.owned = lambda stage: {f"{stage}.{n}": p for n, p in owned(ties, stage).items()}  # type: ignore[method-assign]
        for runner in runners.values():
            for parameter in runner.versions.in_use.values():
                parameter.grad = torch.ones_like(parameter)
        waits.counts.clear()
        for stage in runners:
            stepper.reduce(stage, 0)
        for stage in runners:
            stepper.step(stage, 0)
    return waits


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"on_nonfinite": "warn"}, 1),  # the losses
        ({"on_nonfinite": "stop"}, 2),  # and whether gradients are finite
        ({"on_nonfinite": "stop", "clip_norm": 1.0}, 2),  # read together with their norms
        ({"on_nonfinite": "stop", "clip_norm": 1.0, "weighted": True}, 3),  # norms change with the weight
        ({"on_nonfinite": "stop", "clip_norm": 1.0, "scaler": LossScaler()}, 3),
        ({"on_nonfinite": "skip", "clip_norm": 1.0}, 4),  # and the buffers of two stages
        ({"on_nonfinite": "warn", "deferred": True}, 3),  # and the statistics of two stages
    ],
    ids=str,
)
def test_a_step_waits_a_fixed_number_of_times(options: dict[str, Any], most: int, staleness: int) -> None:
    few, many = (step(size, m, staleness, **dict(options)) for size, m in ((1, 1), (6, 8)))
    assert many.total == few.total == most, (many.counts, few.counts)


def test_scalars_of_the_host_are_read_with_those_of_the_gpu() -> None:
    with counted() as waits:
        # a stage that trains nothing has its largest gradient on the host
        values = read_together([largest([]), torch.ones((), device=CUDA), torch.full((1,), 3.0)])
    assert values.tolist() == [0.0, 1.0, 3.0]
    assert waits.total == 1, waits.counts


def test_the_sum_over_replicas_waits_for_nothing() -> None:
    class Wire:
        def start_all_reduce(self, group: Any, tensor: torch.Tensor) -> Any:
            return types.SimpleNamespace(wait=lambda: tensor)

    with counted() as waits:
        parameters = {f"p{i}": nn.Parameter(torch.ones(100, device=CUDA)) for i in range(8)}
        sums = GradientSum(parameters, list(parameters), (0, 1), Wire(), bucket_bytes=800)  # type: ignore[arg-type]
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        sums.start(parameters)
        sums.finish()
        assert len(sums.buckets) > 2
    assert waits.total == 0, waits.counts


def test_the_leaves_of_a_batch_are_copied_when_they_are_read_and_the_host_does_not_wait() -> None:
    with counted() as waits:
        leaves = {"x": torch.ones(4, 3), "unread": torch.ones(4)}
        placed = Placement(CUDA).of(leaves)
        assert list(placed) == ["x", "unread"] and "x" in placed and len(placed) == 2
        assert not waits.locked
        copied = placed["x"]
        assert copied.is_cuda and copied.shape == (4, 3)
        assert waits.locked == {id(leaves["x"])}
    assert waits.total == 0, waits.counts
    assert Placement(torch.device("cpu")).of({"x": (leaf := torch.ones(2))})["x"] is leaf


def test_a_number_that_the_stage_code_reads_stays_on_the_host() -> None:
    number = Input("number_0", spec_of("float"), Number("mul", "model.py:1", 0, 1, "float", "0.5"))
    with counted() as waits:
        placed = Placement(CUDA).of({"x": torch.ones(4), "number_0": torch.tensor(0.5)}, [number])
        assert placed["x"].is_cuda and not placed["number_0"].is_cuda
        assert placed["number_0"].item() == 0.5
    assert waits.total == 0, waits.counts


def test_memory_that_the_data_has_locked_is_read_before_the_next_minibatch_overwrites_it() -> None:
    with counted() as waits:
        buffer = torch.ones(4, 3).pin_memory()
        assert Placement(CUDA).of({"x": buffer})["x"].is_cuda
        assert dict(waits.counts) == {"from pageable memory": 1}  # the name of a copy for which the host waits


@pytest.mark.parametrize(
    "leaf",
    [torch.ones(1, 3).expand(4, 3), torch.ones(4, 6)[:, ::2], torch.ones(4, 3)[:, :2].t()],
    ids=["expanded", "with gaps", "transposed with gaps"],
)
def test_a_leaf_whose_memory_is_not_dense_is_copied_to_the_gpu(leaf: torch.Tensor) -> None:
    with counted() as waits:
        placed = Placement(CUDA).of({"x": leaf})["x"]
        assert placed.is_cuda and placed.shape == leaf.shape
        assert placed.stride() == leaf.to(CUDA).stride()
        # the driver can copy it in one piece, from memory of its own
        (locked,) = (tensor for tensor in waits.kept if id(tensor) in waits.locked)
        assert locked.stride() == placed.stride() and locked.untyped_storage().nbytes() == 4 * leaf.numel()

"""Replicas sum gradients in buckets that start during the last backward, in one order, with equal results."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopipe.ir.messages import BUCKET_BYTES, num_buckets
from autopipe.runtime.step.reduction import BufferMean, GradientSum
from autopipe.runtime.transport.base import ThreadHub, TransportClosed


class Recorder:
    """A transport of one rank, which records the reductions and sums nothing."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.started: list[torch.Tensor] = []

    def start_all_reduce(self, group: Any, tensor: torch.Tensor) -> Any:
        self.started.append(tensor)

        class Done:
            def wait(self) -> torch.Tensor:
                return tensor

        return Done()


def chain(widths: list[int]) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)))
    return layers, dict(layers.named_parameters())


def together(count: int, body: Callable[[int], Any]) -> list[Any]:
    sums: list[Any] = [None] * count
    threads = [
        threading.Thread(target=lambda rank=rank: sums.__setitem__(rank, body(rank)), daemon=True)
        for rank in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return sums


def test_buckets_are_filled_from_the_last_used_parameter_on_and_start_aligned() -> None:
    _, parameters = chain([3, 5, 7, 11])
    order = ["1.weight", "0.weight", "2.weight"]
    gradient_sum = GradientSum(parameters, order, (0, 1), Recorder(), bucket_bytes=500)
    assert [bucket.names for bucket in gradient_sum.buckets] == [["2.weight", "0.weight"], ["1.weight"]]
    assert gradient_sum.buckets[0].places == {"2.weight": 0, "0.weight": 80}  # 77 numbers, and the next 64 bytes
    assert num_buckets(0) == 1 and num_buckets(BUCKET_BYTES + 1) == 2


def test_a_parameter_larger_than_a_bucket_has_one_of_its_own_and_dtypes_do_not_mix() -> None:
    parameters = {
        "a": nn.Parameter(torch.zeros(1000)),
        "b": nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)),
        "c": nn.Parameter(torch.zeros(4)),
    }
    gradient_sum = GradientSum(parameters, list(parameters), (0, 1), Recorder(), bucket_bytes=256)
    assert [bucket.names for bucket in gradient_sum.buckets] == [["c"], ["b"], ["a"]]


def test_buckets_start_during_the_backward_from_the_last_layers_on() -> None:
    model, parameters = chain([4, 4, 4, 4])
    transport = Recorder()
    gradient_sum = GradientSum(parameters, list(parameters), (0, 1), transport, bucket_bytes=64)
    seen: list[int] = []
    x = torch.ones(2, 4, requires_grad=True)
    model[0].weight.register_hook(lambda gradient: seen.append(len(transport.started)))
    with gradient_sum.watching(parameters):
        model(x).sum().backward()
        assert len(transport.started) == 3
    assert seen == [2]  # the gradients of the other two layers were sent before the first layer's existed
    assert all(parameter.grad is None for parameter in parameters.values())
    gradient_sum.start(parameters)
    gradient_sum.finish()
    expected = torch.autograd.grad(model(x).sum(), list(parameters.values()))
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters.values(), expected, strict=True))
    model(x).sum().backward()  # no hook remains
    assert len(transport.started) == 3


def test_an_unused_parameter_delays_its_bucket_and_the_next_ones() -> None:
    model, parameters = chain([4, 4, 4, 4])
    transport = Recorder()
    gradient_sum = GradientSum(parameters, list(parameters), (0, 1), transport, bucket_bytes=64)
    model[1].weight.grad = torch.full((4, 4), 7.0)  # from an earlier microbatch
    with gradient_sum.watching(parameters):
        model[2](model[0](torch.ones(2, 4))).sum().backward()
    assert len(transport.started) == 1 and gradient_sum.busy
    gradient_sum.start(parameters)
    gradient_sum.finish()
    assert torch.equal(model[1].weight.grad, torch.full((4, 4), 7.0)) and not gradient_sum.busy


@pytest.mark.parametrize("count", [2, 3])
def test_replicas_with_different_missing_gradients_agree_bit_for_bit(count: int) -> None:
    hub = ThreadHub(count)
    gradients = [
        [torch.randn(5, generator=torch.Generator().manual_seed(10 * r + k)) for k in range(3)] for r in range(count)
    ]

    def rank(index: int) -> list[torch.Tensor | None]:
        parameters = {name: nn.Parameter(torch.zeros(5)) for name in ("both", "first", "neither")}
        if index == 0:
            parameters["first"].grad = gradients[0][1].clone()
        parameters["both"].grad = gradients[index][0].clone()
        reduced = GradientSum(parameters, list(parameters), range(count), hub.transport(index))
        reduced.start(parameters)
        reduced.finish()
        return [parameter.grad for parameter in parameters.values()]

    answers = together(count, rank)
    for both, first, nobody in answers:
        assert torch.equal(both, answers[0][0])
        torch.testing.assert_close(both, sum(gradients[r][0] for r in range(count)))
        assert torch.equal(first, gradients[0][1]) and nobody is None


def test_overlapping_sums_finish_in_order() -> None:
    hub = ThreadHub(2)

    def rank(index: int) -> list[float]:
        transport = hub.transport(index)
        tensors = [torch.tensor([float(10 * k + index)]) for k in range(4)]
        pending = [transport.start_all_reduce((0, 1), tensor) for tensor in tensors]
        order = (3, 1, 0, 2) if index else (0, 1, 2, 3)
        reduced = {k: pending[k].wait().item() for k in order}
        return [reduced[k] for k in range(4)]

    assert together(2, rank) == [[1.0, 21.0, 41.0, 61.0]] * 2


def test_a_failed_rank_wakes_ranks_that_wait_for_a_sum() -> None:
    hub = ThreadHub(2)
    pending = hub.transport(0).start_all_reduce((0, 1), torch.zeros(1))

    def wait(index: int) -> bool:
        if index:
            hub.abort()
            return True
        with pytest.raises(TransportClosed, match="another rank has failed"):
            pending.wait()
        return True

    assert together(2, wait) == [True, True]


class Normal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.arange(3.0))


def test_only_written_buffers_are_averaged_in_separate_memory() -> None:
    hub = ThreadHub(2)

    def rank(index: int) -> tuple[Normal, torch.Tensor, torch.Tensor]:
        module = Normal()
        module.norm.running_mean += index
        module.norm.num_batches_tracked += index
        mean, table = module.norm.running_mean, module.table
        written = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
        BufferMean(module, written, {}, (0, 1)).average(hub.transport(index))
        assert module.table is table and module.norm.running_mean is not mean
        return module, mean, table

    for index, (module, mean, _) in enumerate(together(2, rank)):
        assert module.norm.running_mean.tolist() == [0.5, 0.5]
        assert mean.tolist() == [float(index)] * 2
        assert module.norm.num_batches_tracked.item() == index

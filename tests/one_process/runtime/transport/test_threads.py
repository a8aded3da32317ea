"""The transport between threads behaves like the one between processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.nccl.exchanges import compared, order_matters

from autopipe.errors import AutopipeError
from autopipe.ir.messages import ACTIVATION, Channel
from autopipe.runtime.transport.base import ThreadHub, TransportClosed

FORWARD = Channel(ACTIVATION, 0, 1, 0, 1)


def test_the_receiver_gets_separate_memory() -> None:
    hub = ThreadHub(2)
    tensor = torch.zeros(2)
    hub.transport(0).send(FORWARD, tensor)
    tensor += 1
    assert hub.transport(1).receive(FORWARD, (2,), torch.float32).wait().tolist() == [0.0, 0.0]


def test_an_unexpected_shape_is_an_error_with_the_channel_and_both_shapes() -> None:
    hub = ThreadHub(2)
    hub.transport(0).send(FORWARD, torch.zeros(2))
    with pytest.raises(AutopipeError, match=r"activation of stage 0 \(rank 0\) to stage 1 \(rank 1\): expected .*3"):
        hub.transport(1).receive(FORWARD, (3,), torch.float32).wait()


def test_a_failed_rank_wakes_waiting_ranks() -> None:
    hub = ThreadHub(2)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            hub.transport(1).receive(FORWARD, (1,), torch.float32).wait()
        except TransportClosed as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    hub.abort()
    thread.join(5)
    assert len(caught) == 1


def test_a_timeout_names_the_channel() -> None:
    hub = ThreadHub(2, timeout_seconds=0.1)
    with pytest.raises(AutopipeError, match="nothing arrived for 0 s: activation of stage 0"):
        hub.transport(1).receive(FORWARD, (1,), torch.float32).wait()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_sum_is_the_same_on_every_rank(count: int) -> None:
    hub = ThreadHub(count)
    tensors = [torch.tensor([float(rank), 1.0]) for rank in range(count)]
    group = tuple(range(count))
    threads = [
        threading.Thread(target=hub.transport(rank).all_reduce, args=(group, tensors[rank])) for rank in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert all(tensor.tolist() == [sum(range(count)), count] for tensor in tensors)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_parts_are_summed_in_the_order_of_the_ranks_and_gathered(count: int) -> None:
    assert order_matters(count) == (count > 2)
    hub, group = ThreadHub(count), tuple(range(count))
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(lambda rank: compared(hub.transport(rank), group), group, timeout=60))
    for equal in answers:
        assert len(equal) > 50 and all(equal.values()), [name for name in equal if not equal[name]]

"""Messages between CPU ranks: what is transferred, and that every value arrives as it was."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from autopipe.runtime.transport.host_messages import SMALL_BYTES, host_message
from autopipe.strides import Layout, copied, memory_order

LARGE = SMALL_BYTES // 4 + 1  # elements of float32


class Done:
    """A transfer that has copied a packet to the start of a buffer."""

    def __init__(self, buffer: torch.Tensor, packet: torch.Tensor) -> None:
        assert packet.is_contiguous()
        elements = packet.reshape(-1).view(torch.uint8)
        buffer.view(-1).view(torch.uint8)[: len(elements)] = elements

    def wait(self) -> None:
        pass


def transferred(
    tensors: Sequence[torch.Tensor], orders: Sequence[tuple[int, ...]]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the packets of a message, and its values as they arrive."""
    layouts = [Layout(tuple(t.shape), t.dtype, order) for t, order in zip(tensors, orders, strict=True)]
    message = host_message(tuple(layouts))
    packets = message.packets(tensors)
    numbers = itertools.count()
    arriving = message.receive(lambda buffer: Done(buffer, packets[next(numbers)]))
    assert next(numbers) == len(packets)
    return packets, [arriving.take(index) for index in range(len(tensors))]


TRANSPOSED = (1, 0, 0, 0)
MESSAGES = {
    "one": ([torch.randn(3, 5)], [()], 1),
    "one as planned": ([torch.randn(3, 5).t()], [TRANSPOSED], 1),
    "one other than planned": ([torch.randn(3, 5).t()], [()], 1),
    "gaps as planned": ([torch.randn(3, 8)[:, :5]], [(0, 1, 1, 0)], 1),
    "no dimension": ([torch.tensor(2.5)], [()], 1),
    "small": ([torch.randn(3), torch.arange(4), torch.tensor(True), torch.ones(2, dtype=torch.complex64)], 4 * [()], 1),
    "small, one transposed": ([torch.randn(3), torch.randn(4, 2).t(), torch.tensor(1.0)], 3 * [()], 1),
    "empty": ([torch.randn(0, 3)], [()], 0),
    "some empty": ([torch.randn(0, 3), torch.randn(2), torch.randn(4, 0)], 3 * [()], 1),
    "large": ([torch.randn(LARGE)], [()], 1),
    "large as planned": ([torch.randn(LARGE, 2).t()], [TRANSPOSED], 1),
    "large, transposed": ([torch.randn(LARGE, 2).t()], [()], 1),
    "large, others empty": ([torch.randn(0), torch.randn(LARGE), torch.randn(2, 0)], 3 * [()], 1),
    "both": ([torch.randn(LARGE), torch.randn(3), torch.randn(2, LARGE)], 3 * [()], 3),
    "both, transposed": ([torch.randn(LARGE), torch.randn(3, 2).t(), torch.randn(2, LARGE).t()], 3 * [()], 3),
}  # fmt: skip


@pytest.mark.parametrize("case", MESSAGES)
def test_every_value_arrives_in_its_own_order_in_memory(case: str) -> None:
    tensors, orders, transfers = MESSAGES[case]
    packets, arrived = transferred(tensors, orders)
    assert len(packets) == transfers
    for sent, received in zip(tensors, arrived, strict=True):
        assert received.dtype == sent.dtype and torch.equal(received, sent)
        assert memory_order(received) == memory_order(sent)


@pytest.mark.parametrize("case", ["one", "one as planned", "large", "large as planned"])
def test_a_value_in_the_order_of_the_plan_is_sent_alone_without_a_copy(case: str) -> None:
    tensors, orders, _ = MESSAGES[case]
    packets, _ = transferred(tensors, orders)
    assert packets[0].data_ptr() == tensors[0].data_ptr() and packets[0].nbytes == tensors[0].nbytes


def test_large_values_are_sent_without_a_copy() -> None:
    tensors = [torch.randn(LARGE), torch.randn(2, LARGE).t()]
    packets, _ = transferred(tensors, [(), ()])
    assert [packet.data_ptr() for packet in packets[1:]] == [tensor.data_ptr() for tensor in tensors]


def test_a_value_that_is_changed_in_place_leaves_the_others_usable() -> None:
    _, (first, second) = transferred([torch.ones(3), torch.ones(3)], [(), ()])
    second.requires_grad_()
    product = second * second  # autograd keeps it
    first.add_(1)
    product.sum().backward()
    assert torch.equal(second.grad, torch.full((3,), 2.0)) and torch.equal(first, torch.full((3,), 2.0))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3),
        torch.randn(2, 3).t(),
        torch.randn(2, 8, 3, 4).transpose(1, 2),
        torch.randn(2, 5, 3, 6).permute(0, 2, 3, 1)[..., ::2],
        torch.randn(1, 3, 1, 4).transpose(0, 3),
        torch.ones(()).expand(3, 4),
        torch.randn(3, 1).expand(3, 4)[:, :2],
        torch.randn(6, 4)[:, :2],
        torch.randn(6, 4)[:, 1],
        torch.randn(6, 4)[2:4],
        torch.randn(6, 40).t()[3:20],
        torch.randn(2, 3, 4, 5)[:, 1:, ::2, :3].transpose(0, 3),
        torch.randn(3, 1, 5)[:, :, 1:2],
        torch.randn(9),
    ],
    ids=lambda t: f"{tuple(t.shape)}-{t.stride()}",
)
def test_a_tensor_arrives_with_its_strides(tensor: torch.Tensor) -> None:
    # without its strides, an attention head or a slice is summed in another order by the next stage, and the last bits
    # differ
    layout = memory_order(tensor)
    _, (received,) = transferred([tensor], [()])
    for other in (received, copied(tensor)):
        assert torch.equal(other, tensor)
        assert memory_order(other) == layout
    if 0 in tensor.stride() or not any(layout[tensor.dim() :]):
        assert received.stride() == tensor.clone().stride()
    else:
        assert received.untyped_storage().nbytes() <= 4 * (tensor.numel() * 2 + 17 * tensor.numel() / tensor.shape[-1])

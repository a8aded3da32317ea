"""Messages between the controller and its ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from autopipe.bits import same_bits
from autopipe.script.codec import (
    UnsendableError,
    Value,
    decoded,
    encoded,
    module_form,
    rebuilt_module,
)


def sent(value: Any) -> Any:
    data = memoryview(b"".join(bytes(part) for part in encoded(value)))
    position = 0

    def read(buffer: memoryview) -> None:
        nonlocal position
        buffer[:] = data[position : position + len(buffer)]
        position += len(buffer)

    result = decoded(read)
    assert position == len(data)
    return result


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, "text", 0.1, float("inf"), 1 - 2j, ..., slice(1, None, 2), torch.Size([2, 3]), torch.float16,
        torch.device("cpu"), torch.channels_last, (1, [2.5, {"a": (None,)}]), {3: "x", "y": [()]}, F.cross_entropy,
        F.max_pool2d, torch.add, torch.optim.AdamW, getattr, torch.special.erf,
    ],
)  # fmt: skip
def test_a_value_arrives_as_it_was(value: Any) -> None:
    assert sent(value) == value
    assert type(sent(value)) is type(value)


def test_nan_and_value_numbers_arrive() -> None:
    assert sent(float("nan")) != sent(float("nan"))
    assert isinstance(sent(Value(5)), Value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4), torch.randn(3, 4).T, torch.randn(4, 6)[:, 1:3], torch.randn(3, 1).expand(3, 5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.tensor(2.5), torch.empty(0, 3),
        torch.randn(3, dtype=torch.complex64), torch.randn(4).bfloat16(), torch.tensor([True, False]),
        torch.arange(5), torch.randn(100, 1000)[:, :1],
    ],
)  # fmt: skip
def test_a_tensor_arrives_with_its_bits_and_strides(tensor: Tensor) -> None:
    arrived = sent(tensor)
    assert same_bits(arrived, tensor)
    if tensor.numel() > 100 or tensor.is_contiguous() or tensor.numel() < 50:
        assert arrived.stride() == (tensor.stride() if tensor.shape != (100, 1) else (1, 1))


def test_a_message_is_a_copy() -> None:
    tensor = torch.zeros(3)
    parts = encoded([tensor])
    tensor.fill_(1)
    assert bytes(parts[3]) == bytes(12)


def test_what_only_the_script_has_is_refused() -> None:
    for value in (lambda: 0, object(), torch.Generator()):
        with pytest.raises(UnsendableError):
            encoded([value])


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(3, 2),
        nn.LSTM(3, 3, 2),
        nn.MultiheadAttention(4, 2),
        nn.BatchNorm1d(3),
        nn.GroupNorm(1, 3),
        nn.Dropout(0.3),
    ],
)
def test_a_module_is_rebuilt(module: nn.Module) -> None:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = {id(tensor): name for name, tensor in tensors.items()}
    again = rebuilt_module(sent(module_form(module, names)), tensors)
    assert type(again) is type(module)
    assert all(a is b for a, b in zip(again.parameters(), module.parameters(), strict=True))
    shape = (4, 3) if not isinstance(module, nn.MultiheadAttention) else (4, 4)
    given = [torch.randn(shape)] * (3 if isinstance(module, nn.MultiheadAttention) else 1)
    torch.manual_seed(0)
    expected = module(*given)
    torch.manual_seed(0)
    for a, b in zip(pytree.tree_leaves(again(*given)), pytree.tree_leaves(expected), strict=True):
        assert same_bits(a.detach(), b.detach())


def test_zeros_of_other_signs_are_other_bytes() -> None:
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]))
    assert not same_bits(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64))

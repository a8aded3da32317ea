"""A minibatch in memory that two processes map."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

from autopipe.runtime.audit.batch import UnstorableBatchError
from autopipe.runtime.batches.shared import share, shared

TABLE = torch.arange(4000.0).view(40, 100)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.arange(3).expand(2, 3),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.empty(0, 5),
        torch.tensor([True, False]),
        torch.randn(3).requires_grad_(),
        torch.arange(10.0)[1:9:2],
    ],
)
def test_a_tensor_arrives_with_its_bits_and_strides(tensor: torch.Tensor) -> None:
    arrived = shared(*share((tensor, None)))[0]
    assert torch.equal(arrived, tensor)
    assert arrived.dtype == tensor.dtype
    assert arrived.stride() == tensor.stride()
    assert arrived.requires_grad == tensor.requires_grad


def test_values_and_containers_arrive_as_they_were() -> None:
    x = torch.ones(2)
    item = {"a": [x, (x, -0.0)], 3: None, "text": "\ud800", "nan": float("inf")}
    arrived: dict[Any, Any] = shared(*share(item))
    assert str(arrived) == str(item)
    assert arrived["a"][0] is arrived["a"][1][0]


def test_a_column_of_a_table_does_not_bring_the_table() -> None:
    column = TABLE[:, 7]
    _, described, _ = sent = share(column)
    assert described[0]["bytes"] < 1000
    assert torch.equal(shared(*sent), column)


@pytest.mark.parametrize("value", [collections.OrderedDict(a=1), torch.eye(2).to_sparse(), b"x", 1j])
def test_another_type_is_named(value: Any) -> None:
    with pytest.raises(UnstorableBatchError, match="it contains a"):
        share({"x": value})

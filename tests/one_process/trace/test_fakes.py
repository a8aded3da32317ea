"""``fake_of`` is ``FakeTensorMode.from_tensor``: the same properties, and memory shared where it was shared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autopipe.trace.record.fakes import fake_of

FLAT = torch.arange(24.0)
STEPPED = nn.Parameter(torch.randn(2))
STEPPED.grad = torch.ones(2)
TENSORS = {
    "parameter": nn.Parameter(torch.randn(3, 4)),
    "frozen parameter": nn.Parameter(torch.randn(3, 4), requires_grad=False),
    "parameter with a gradient": STEPPED,
    "transposed parameter": nn.Parameter(torch.randn(3, 4).t()),
    "parameter on a slice of a larger memory": nn.Parameter(FLAT[4:12].view(2, 4)),
    "parameter without elements": nn.Parameter(torch.empty(0, 3)),
    "scalar": torch.tensor(3),
    "buffer of integers": torch.arange(6).view(2, 3),
    "view": FLAT[2:8],
    "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "expanded": torch.randn(3, 1).expand(3, 4),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "half precision": torch.randn(3).bfloat16(),
    "buffer": nn.Buffer(torch.randn(3)),
}


def properties(fake: Tensor) -> dict[str, object]:
    return {
        "type": type(fake),
        "parameter": isinstance(fake, nn.Parameter),
        "shape": fake.shape,
        "stride": fake.stride(),
        "offset": fake.storage_offset(),
        "dtype": fake.dtype,
        "device": fake.device,
        "requires_grad": fake.requires_grad,
        "leaf": fake.is_leaf,
        "view": fake._is_view(),
        "conjugated": fake.is_conj(),
        "gradient": fake.grad is None,
        "bytes": fake.untyped_storage().nbytes(),
    }


@pytest.mark.parametrize("name", TENSORS)
def test_a_fake_has_the_properties_that_torch_gives_it(name: str) -> None:
    fake = fake_of(FakeTensorMode(), TENSORS[name])
    assert isinstance(fake, FakeTensor)
    assert properties(fake) == properties(FakeTensorMode().from_tensor(TENSORS[name], static_shapes=True))


def test_a_tensor_has_one_fake_in_a_mode() -> None:
    mode, weight = FakeTensorMode(), nn.Parameter(torch.randn(3))
    assert fake_of(mode, weight) is mode.from_tensor(weight, static_shapes=True) is fake_of(mode, weight)


@pytest.mark.parametrize("view_first", [False, True])
def test_fakes_share_memory_where_their_tensors_do(view_first: bool) -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    row, other = weight.data[1], nn.Parameter(torch.randn(4))
    mode = FakeTensorMode()
    fakes = [fake_of(mode, tensor) for tensor in ((row, weight, other) if view_first else (weight, row, other))]
    first, second, apart = (fake.untyped_storage()._cdata for fake in fakes)
    assert first == second
    assert apart != first

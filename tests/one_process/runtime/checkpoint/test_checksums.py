"""A checksum of a tensor changes with any of its bits."""

from __future__ import annotations

import pytest
import torch

from autopipe.runtime.checkpoint.checksums import bits, checksums


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9])
def test_a_checksum_changes_with_any_element_and_not_with_the_place_in_memory(dtype: torch.dtype, count: int) -> None:
    values = (torch.arange(count + 1) % 2).to(dtype)
    tensor = values[1:].clone()
    assert bits(values[1:]) == bits(tensor) == checksums({"t": values[1:]})["t"]
    for place in range(count):
        other = tensor.clone()
        other[place] = ~other[place] if dtype == torch.bool else other[place] + 1
        assert bits(other) != bits(tensor), place


def test_each_part_of_a_sparse_tensor_has_a_checksum() -> None:
    tensor = torch.eye(4).to_sparse()
    assert set(checksums({"t": tensor, "d": torch.ones(2)})) == {
        *(f"t@sparse_coo.{part}" for part in ("indices", "values", "size")),
        "d",
    }


def test_the_checksum_depends_on_the_place_of_every_number():
    rows = torch.arange(48.0).reshape(6, 8)
    assert bits(rows) != bits(rows.flip(0))
    assert bits(rows) == bits(rows.clone())
    first, second = torch.zeros(600_000), torch.zeros(600_000)
    first[0], second[-2] = 1.0, 1.0  # in another chunk
    assert bits(first) != bits(second)
    few = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)  # less than a word
    assert bits(few) != bits(few.flip(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 4, 8, 1000])
def test_a_checksum_changes_with_signs(dtype: torch.dtype, count: int) -> None:
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
    others = [-tensor, tensor.abs(), torch.cat([-tensor[:2], tensor[2:]])]
    if dtype.is_complex:
        tensor = tensor * (1 + 2j)
        others = [-tensor, tensor.conj().resolve_conj(), tensor.real.to(dtype)]
    assert all(torch.equal(other, tensor) or bits(other) != bits(tensor) for other in others)

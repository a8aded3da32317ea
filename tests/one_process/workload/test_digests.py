"""Digests of minibatches: the differences that they detect, and those that they must ignore."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from autopipe.workload.batches.digests import chained, digest_of

SMALL = torch.arange(12.0).view(3, 4)
LARGE = torch.randn(50_001, 3, generator=torch.Generator().manual_seed(0))


def changed(tensor: torch.Tensor, index: tuple[int, ...], value: float) -> torch.Tensor:
    other = tensor.clone()
    other[index] = value
    return other


DIFFERENT = {
    "one element": ((SMALL, 1), (changed(SMALL, (2, 3), 11.5), 1)),
    "another dtype": ((torch.zeros(4), None), (torch.zeros(4, dtype=torch.int32), None)),
    "another shape": ((torch.zeros(4, 2), None), (torch.zeros(2, 4), None)),
    "minus zero": ((torch.zeros(2), None), (-torch.zeros(2), None)),
    "a large tensor's last element": ((LARGE, None), (changed(LARGE, (50_000, 2), 7.0), None)),
    "a large tensor's first element": ((LARGE, None), (changed(LARGE, (0, 0), 7.0), None)),
    "two rows of a large tensor exchanged": ((LARGE, None), (LARGE[torch.arange(50_001).roll(1)], None)),
    "two columns of the folding exchanged": ((LARGE, None), (LARGE.flatten().roll(8192).view(50_001, 3), None)),
    "another key": ({"x": SMALL, "a": SMALL}, {"x": SMALL, "b": SMALL}),
    "a key more": ({"x": SMALL}, {"x": SMALL, "mask": None}),
    "a number": ({"x": SMALL, "alpha": 0.1}, {"x": SMALL, "alpha": 0.17}),
    "an integer for a float": ({"x": SMALL, "k": 1}, {"x": SMALL, "k": 1.0}),
    "a text": ({"x": SMALL, "task": "a"}, {"x": SMALL, "task": "b"}),
    "an array": ({"x": SMALL, "n": np.arange(3)}, {"x": SMALL, "n": np.arange(3) + 1}),
    "input and target exchanged": ((SMALL, SMALL + 1), (SMALL + 1, SMALL)),
    "a boundary between two tensors": ((SMALL[:1], SMALL[1:]), (SMALL[:2], SMALL[2:])),
}
EQUAL = {
    "a copy": ((SMALL, LARGE), (SMALL.clone(), LARGE.clone())),
    "another layout in memory": ((SMALL, None), (SMALL.t().contiguous().t(), None)),
    "the order of keys": ({"x": SMALL, "y": 2}, {"y": 2, "x": SMALL}),
    "objects of one class": ((SMALL, object()), (SMALL, object())),
    "not a number": ({"x": SMALL * float("nan"), "a": float("nan")}, {"x": SMALL * float("nan"), "a": float("nan")}),
}
KINDS = [
    torch.randn(3, dtype=torch.complex64).conj(),
    torch.eye(3).to_sparse(),
    torch.tensor(3.0),
    torch.zeros(0, 3),
    torch.ones(3, dtype=torch.bfloat16),
    torch.ones(2, 3).expand(2, 3)[:, 1],
    torch.tensor([True, False]),
    torch.zeros(3, dtype=torch.uint8)[1:],
    torch.zeros(70_001, dtype=torch.uint8)[1:],
    torch.nn.Parameter(torch.ones(2)),
]


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_difference_changes_the_digest(case: str) -> None:
    first, second = DIFFERENT[case]
    assert digest_of(first) != digest_of(second)


@pytest.mark.parametrize("case", EQUAL)
def test_equal_minibatches_have_equal_digests(case: str) -> None:
    first, second = EQUAL[case]
    assert digest_of(first) == digest_of(second)


@pytest.mark.parametrize("leaf", KINDS, ids=lambda leaf: f"{leaf.dtype} {leaf.layout} {tuple(leaf.shape)}")
def test_every_kind_of_tensor_has_a_digest(leaf: torch.Tensor) -> None:
    assert digest_of((leaf, "\ud800")) == digest_of((leaf.clone(), "\ud800"))


def test_every_bit_of_a_large_tensor_counts() -> None:
    data = torch.zeros(100_003, dtype=torch.uint8)
    seen = {digest_of((data, None))}
    places = torch.randint(0, len(data), (200,), generator=torch.Generator().manual_seed(1)).unique().tolist()
    for place in places:
        data[place] ^= 1 << (place % 8)
        seen.add(digest_of((data, None)))
    assert len(seen) == len(places) + 1


def test_another_process_computes_the_same_digest() -> None:
    text = (
        "import torch; from autopipe.workload.batches.digests import digest_of\n"
        "print(digest_of({'x': torch.arange(100_000.), 's': 'text', 'o': object()}).hex())"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    item: dict[str, Any] = {"x": torch.arange(100_000.0), "s": "text", "o": object()}
    assert done.stdout.strip() == digest_of(item).hex()


def test_a_chain_depends_on_order_and_number() -> None:
    first, second = digest_of((SMALL, 1)), digest_of((SMALL, 2))
    chains = [b"", chained(b"", first), chained(chained(b"", first), second), chained(chained(b"", second), first)]
    assert len(set(chains)) == 4

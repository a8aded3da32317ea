"""The microbatch sizes that are measured if no option names them."""

from __future__ import annotations

import pytest

from autopipe.commands.planning.request import larger_sizes


@pytest.mark.parametrize(
    ("batch_size", "sizes"),
    [(1, ()), (32, ()), (33, (9,)), (64, (16,)), (256, (16, 64)), (300, (19, 75)), (4096, (16, 64, 256, 1024))],
)
def test_a_quarter_of_a_large_minibatch_is_measured_and_a_quarter_of_that(
    batch_size: int, sizes: tuple[int, ...]
) -> None:
    assert larger_sizes(batch_size) == sizes

"""Shares: the factors of microbatches, by samples or by the divisors of the loss."""

from __future__ import annotations

import pytest

from autopipe.ir.microbatch_loss import Shares
from autopipe.ir.rounding import NOISE_FACTOR, TOLERANCE, USUAL_FACTOR, allowed


def test_shares_of_samples_are_parts_of_their_sum() -> None:
    assert Shares.of_samples([3, 1]) == Shares((0.75, 0.25), 4.0)


def test_a_divisor_other_than_samples_decides_the_factors() -> None:
    assert Shares.of([10], [[9], [1]], [2, 2]) == Shares((0.9, 0.1), 10.0)


def test_equal_factors_of_samples_and_divisor_keep_the_total_of_the_divisor() -> None:
    assert Shares.of([8, 4], [[4, 2], [4, 2]], [2, 2]) == Shares((0.5, 0.5), 8.0)


def test_a_term_with_divisor_zero_is_ignored() -> None:
    assert Shares.of([0, 4], [[0, 3], [0, 1]], [2, 2]) == Shares((0.75, 0.25), 4.0)
    assert Shares.of([0], [[0], [0]], [1, 3]) == Shares((0.25, 0.75), 0.0)


def test_terms_that_disagree_fall_back_to_samples_with_the_difference() -> None:
    assert Shares.of([4, 4], [[3, 1], [1, 3]], [2, 2]) == Shares((0.5, 0.5), 4.0, 0.5)


def test_a_penalty_needs_factors_that_sum_to_one() -> None:
    divisors = [4], [[2], [1]]
    assert Shares.of(*divisors, [2, 2]) == Shares((0.5, 0.25), 4.0)
    assert Shares.of(*divisors, [2, 2], penalty=True) == Shares((0.5, 0.5), 4.0, 0.25)
    assert Shares.of([4], [[3], [1]], [2, 2], penalty=True) == Shares((0.75, 0.25), 4.0)


@pytest.mark.parametrize(
    ("usual", "own", "expected"),
    [(0.0, 0.0, TOLERANCE), (1e-5, 0.0, USUAL_FACTOR * 1e-5), (1e-7, 1e-4, NOISE_FACTOR * 1e-4)],
)
def test_the_tolerance_is_the_largest_of_three(usual: float, own: float, expected: float) -> None:
    assert allowed(usual, own) == expected

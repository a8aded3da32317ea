"""Human-readable numbers."""

import pytest

from autopipe.report.text import in_ranges
from autopipe.units import in_bytes, in_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1536, "1.50 KiB"), (20 * 2**20, "20.0 MiB"), (150 * 2**30, "150 GiB")],
)
def test_bytes_have_three_digits_and_a_unit(count, text):
    assert in_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (1.25, "1.25 s"), (0.0123, "12.3 ms"), (4.5e-6, "4.50 us"), (5e-9, "5 ns"), (120, "120 s")],
)
def test_seconds_have_three_digits_and_a_unit(seconds, text):
    assert in_seconds(seconds) == text


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [((), ""), ((3,), "3"), ((0, 1), "0,1"), ((0, 1, 2), "0-2"), ((0, 1, 4, 5, 6, 9), "0,1,4-6,9"), ((0, 8), "0,8")],
)
def test_runs_of_numbers_are_shown_as_ranges(numbers, shown):
    assert in_ranges(numbers) == shown

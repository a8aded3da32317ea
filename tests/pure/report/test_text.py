"""Human-readable numbers."""

import pytest

from autopipe.report.text import in_ranges


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [((), ""), ((3,), "3"), ((0, 1), "0,1"), ((0, 1, 2), "0-2"), ((0, 1, 4, 5, 6, 9), "0,1,4-6,9"), ((0, 8), "0,8")],
)
def test_runs_of_numbers_are_shown_as_ranges(numbers, shown):
    assert in_ranges(numbers) == shown

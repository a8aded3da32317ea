"""The grid of a schedule in a terminal: the same cells, coloured, in parts that fit."""

from __future__ import annotations

import pytest

from autopipe.report.grids import for_terminal

GRID = """\
rank 0 | F0  F1  F2      B0      B1  B2+
rank 1 |     F0  F1  B0  F2  B1  B2+"""


def test_a_grid_that_fits_is_unchanged() -> None:
    first, legend = for_terminal(GRID + "\n", 80)
    assert first.plain == GRID
    assert "forward" in legend.plain
    assert "weights" not in legend.plain


@pytest.mark.parametrize("width", [20, 24, 30, 38])
def test_a_wide_grid_is_cut_between_cells(width: int) -> None:
    *parts, _ = for_terminal(GRID, width)
    assert len(parts) > 1
    rows = ["", ""]
    for part in parts:
        lines = [line for line in part.plain.split("\n") if line.startswith("rank")]
        assert max(map(len, lines)) <= width
        for index, line in enumerate(lines):
            rows[index] += " " + line.partition("|")[2]
    assert [row.split() for row in rows] == [line.partition("|")[2].split() for line in GRID.split("\n")]


def test_neighbouring_microbatches_have_different_colours() -> None:
    first, _ = for_terminal("rank 0 | F0 F1 B0 B1 I10 W11@2 1F1:3+", 80)
    styles = {first.plain[span.start : span.end]: str(span.style) for span in first.spans}
    assert styles["F0"] != styles["F1"]
    assert styles["F0"] != styles["B0"]
    assert set(styles) == {"F0", "F1", "B0", "B1", "I10", "W11@2", "1F1:3", "+"}


@pytest.mark.parametrize("grid", ["", "rank 0 |", "no grid at all"])
def test_an_empty_grid_is_shown(grid: str) -> None:
    assert for_terminal(grid, 80)

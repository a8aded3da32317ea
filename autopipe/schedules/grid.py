"""Rows of instructions as text, in order and without times. For errors, because an invalid schedule may not finish."""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.ir.schedule import Schedule

_COLUMNS_AROUND = 8
_RANKS_AROUND = 8


def table(rows: Sequence[Sequence[str]], first_rank: int = 0) -> str:
    """Return one line per rank, with the cells in columns of equal width and no trailing spaces."""
    width = max((len(cell) for row in rows for cell in row), default=1)
    digits = len(str(first_rank + len(rows) - 1))
    return "\n".join(
        f"rank {first_rank + index:>{digits}} | {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for index, row in enumerate(rows)
    )


def marked(schedule: Schedule, rank: int, index: int) -> str:
    """Return the part of the grid around instruction ``index`` of ``rank``, with that instruction in ``>...<``.

    Columns are positions in the row, not times. ``index`` may be the row's length, to mark its end.
    """
    low_rank, high_rank = max(rank - _RANKS_AROUND, 0), rank + _RANKS_AROUND + 1
    low, high = max(index - _COLUMNS_AROUND, 0), index + _COLUMNS_AROUND + 1
    rows = []
    for r, row in enumerate(schedule.rows[low_rank:high_rank], start=low_rank):
        cells = [str(i) for i in row[low:high]]
        if r == rank:
            cells.extend([""] * (index - low + 1 - len(cells)))
            cells[index - low] = f">{cells[index - low]}<"
        before, after = ["..."] if low else [], ["..."] if high < len(row) else []
        rows.append(before + cells + after)
    return table(rows, low_rank)

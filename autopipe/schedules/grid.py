"""Rows of instructions as text, in order and without times: for errors, where a schedule may never finish."""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.ir.schedule import Schedule

_COLUMNS_AROUND = 8
_RANKS_AROUND = 8


def table(rows: Sequence[Sequence[str]], first_rank: int = 0) -> str:
    """Return cells in columns of one width, a line a rank; nothing hangs over at the right."""
    width = max((len(cell) for row in rows for cell in row), default=1)
    digits = len(str(first_rank + len(rows) - 1))
    return "\n".join(
        f"rank {first_rank + index:>{digits}} | {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for index, row in enumerate(rows)
    )


def marked(schedule: Schedule, rank: int, index: int) -> str:
    """Return the part of the grid around instruction ``index`` of ``rank``, which stands in ``>...<``.

    Columns are places in the row, not times. ``index`` may be the row's length: the mark then stands behind its end.
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

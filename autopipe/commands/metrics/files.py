"""``MetricsFiles``: ``metrics.jsonl`` and ``metrics.csv`` of a run, written by the process of the command.

::

    rows ---> metrics.jsonl             every row, one JSON object a line
         +--> metrics.csv               the rows of steps and evaluations, as a table
    keep_before(step) ---> the rows from ``step`` on: metrics.abandoned.jsonl

A row is written and flushed at once. A killed process thus leaves at most one incomplete line, and ``keep_before``
removes it. The table is derived from the JSON lines, and written again when a run resumes.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from autopipe.errors import RunError, disk_is_full
from autopipe.runtime.job import RunDirectory, read_rows
from autopipe.units import finite

SCHEMA_VERSION = 1
COLUMNS = (
    *("step", "loss", "evaluation_loss", "learning_rate", "gradient_norm", "skipped", "samples"),
    *("samples_per_second", "step_seconds", "seconds", "time"),
)


class MetricsFiles:
    """The files of one run. They are opened by the first row."""

    def __init__(self, run: RunDirectory) -> None:
        self.lines, self.table = run.metrics, run.metrics.with_suffix(".csv")
        self._lines: TextIO | None = None
        self._table: TextIO | None = None

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row. NaN and infinities are ``null`` in the JSON, and ``nan`` in the table.

        Raises: RunError if a file cannot be written, for example on a full disk.
        """
        with self._explained():
            if self._lines is None:
                self._lines = self.lines.open("a", encoding="utf-8")
            self._lines.write(_line(row))
            self._lines.flush()
            if _in_table(row):
                if self._table is None:
                    self._table = self._open_table()
                csv.writer(self._table).writerow(_cells(row))
                self._table.flush()

    def keep_before(self, step: int | None) -> None:
        """Keep what was known when ``step`` steps were done; move the other rows to ``metrics.abandoned.jsonl``.

        These are the steps from ``step`` on, and evaluations and audits after it. The run repeats them. None: a new
        run keeps nothing. An incomplete last line is removed.

        Raises: RunError if a file cannot be written.
        """
        self.close()
        if not (self.lines.is_file() or self.table.is_file()):
            return
        kept, table = _temporary(self.lines), _temporary(self.table)
        with self._explained(), _removed(kept, table):
            abandoned = self.lines.with_name("metrics.abandoned.jsonl")
            with contextlib.ExitStack() as files:
                rows = files.enter_context(kept.open("w", encoding="utf-8"))
                others: TextIO | None = None
                for row in read_rows(self.lines):
                    if step is not None and _is_before(row, step):
                        rows.write(json.dumps(row) + "\n")
                        continue
                    if others is None:
                        others = files.enter_context(abandoned.open("a", encoding="utf-8"))
                    others.write(json.dumps(row) + "\n")
                _sync(rows)
                if others is not None:
                    _sync(others)
            kept.replace(self.lines)
            with table.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(COLUMNS)
                writer.writerows(_cells(row) for row in read_rows(self.lines) if _in_table(row))
                _sync(file)
            table.replace(self.table)

    def close(self) -> None:
        """Close the files. A later row opens them again."""
        for file in (self._lines, self._table):
            if file is not None:
                with contextlib.suppress(OSError):  # each row was flushed
                    file.close()
        self._lines = self._table = None

    def __del__(self) -> None:
        self.close()

    def _open_table(self) -> TextIO:
        file = self.table.open("a", encoding="utf-8", newline="")
        if not file.tell():
            csv.writer(file).writerow(COLUMNS)
        return file

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn an OSError into a RunError. The message of a full disk does not name the file."""
        try:
            yield
        except OSError as error:
            self.close()
            full = disk_is_full(error, self.lines.parent)
            raise RunError(
                f"the metrics cannot be written: {'the disk is full' if full else error.strerror}",
                where=str(error.filename or self.lines),
                remedy="free space on that disk, or choose another one (--run-dir); then add --resume",
            ) from None


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextlib.contextmanager
def _removed(*temporary: Path) -> Iterator[None]:
    """Remove what is left of temporary files at the end."""
    try:
        yield
    finally:
        for path in temporary:
            with contextlib.suppress(OSError):
                path.unlink()


def _sync(file: TextIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _line(row: Mapping[str, Any]) -> str:
    plain = {key: _finite(value) for key, value in row.items()}
    return json.dumps({**plain, "schema_version": SCHEMA_VERSION}, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return finite(value)
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def _is_before(row: Mapping[str, Any], step: int) -> bool:
    """Return whether a row was known when ``step`` optimizer steps were done. Rows without a step are kept."""
    if "audit" in row:
        return bool(row["audit"] < step)
    if "evaluation_loss" in row:
        return bool(row["step"] <= step)
    return "loss" not in row or bool(row["step"] < step)


def _in_table(row: Mapping[str, Any]) -> bool:
    return "audit" not in row and ("loss" in row or "evaluation_loss" in row)


def _cells(row: Mapping[str, Any]) -> list[Any]:
    """Return the cells of a row, "" for what it does not have."""
    return [_cell(row[name]) if name in row else "" for name in COLUMNS]


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "nan"
    return value

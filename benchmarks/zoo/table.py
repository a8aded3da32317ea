"""Write the results of the zoo as a Markdown table."""

from __future__ import annotations

import collections
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


def summary(rows: Sequence[Row]) -> str:
    """Return the number of models for each result."""
    counts = collections.Counter(row["result"] for row in rows)
    ratios = [row["capture_seconds"] / row["export_seconds"] for row in rows if row.get("export_seconds")]
    ratio = f"; median capture {statistics.median(ratios):.2f} of torch.export's time" if ratios else ""
    return f"{len(rows)} models: " + ", ".join(f"{count} {result}" for result, count in counts.most_common()) + ratio


TITLES = {
    "first": "Models used to develop the tracer",
    "more": "Further models, chosen by name before any was tested",
}
HEAD = """# The zoo

Each model is captured, planned in three stages, generated, and compared in stages with the model itself, at two batch
sizes and two seeds, with dropout. *exact*: loss, every gradient and every buffer are equal bit for bit. *equal*: within
a relative error of 1e-6. *refused*: nothing is trained, and the message names the line.
Seconds are CPU time of the capture without its verification, and of `torch.export(strict=False)` of the same model in
the same process: medians of up to five alternating rounds."""


EARLIER = "Ratios with a star are of an earlier run, in wall-clock time."


def write_table(sets: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Write a table for each set, under its summary."""
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, one thread."
    earlier = [row for rows in sets.values() for row in rows if _is_earlier(row)]
    lines = [HEAD, *([EARLIER] if earlier else []), machine]
    for which, rows in sets.items():
        lines += ["", f"## {TITLES[which]}", "", f"{summary(rows)}.", "", *_table(rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _is_earlier(row: Row) -> bool:
    return bool(row.get("export_seconds")) and "clock" not in row


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| model | result | capture method | nodes | stages | capture s | export s | ratio | reason |",
        "|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        capture, export = row.get("capture_seconds"), row.get("export_seconds")
        ratio = f"{capture / export:.2f}{'*' if _is_earlier(row) else ''}" if capture and export else ""
        cells = [
            row["name"],
            row["result"],
            row.get("method", ""),
            str(row.get("nodes", "")),
            str(row.get("stages", "")),
            f"{capture:.2f}" if capture else "",
            f"{export:.2f}" if export else row.get("export_error", ""),
            ratio,
            row.get("reason", "").replace("|", "\\|").replace("\n", " "),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines

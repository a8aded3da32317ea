"""The page that the trials write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one trial ended."""

    name: str
    expected: str
    result: str  # "held", "did not hold" or "not run"
    detail: str
    seconds: float = 0.0


def page(outcomes: Sequence[Outcome], machine: Sequence[tuple[str, str]], title: str) -> str:
    """Return the results as Markdown. ``machine``: pairs of a name and a value."""
    counts = {result: sum(one.result == result for one in outcomes) for result in ("held", "did not hold", "not run")}
    lines = [
        f"# {title}",
        "",
        "Written by `make gpu-trial`, one line for each trial as it ends. "
        + "; ".join(f"{a}: {b}" for a, b in machine),
        "",
        ", ".join(f"{count} {result}" for result, count in counts.items()) + ".",
        "",
        "| trial | expected | result | measured | seconds |",
        "|---|---|---|---|---|",
    ]
    for one in outcomes:
        detail = " ".join(one.detail.replace("|", "/").split())
        lines.append(f"| {one.name} | {one.expected} | {one.result} | {detail} | {one.seconds:.0f} |")
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """Replace a file, so that a reader never sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)

"""Compare what the search for Python state says, what plain training does and what the tape reports, case by case.

Usage: ``python benchmarks/tape.py --rows FILE [--steps N] [--group NAME] [--quick]``. Cases that FILE has are not run
again, so that a long table can be made in parts. The results, ``benchmarks/results/tape.md``, are written from FILE at
the end. ``--quick``: without plain training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results" / "tape.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.models import guarded  # noqa: E402
from support.models.state import ACCEPTED, BASE, REFUSED  # noqa: E402
from support.models.state_objects import BETWEEN, DISCARDED, OBJECTS, QUIET  # noqa: E402
from support.models.state_places import PLACES, SETTINGS, UNCHANGED  # noqa: E402
from support.pipelines import BATCH, captured  # noqa: E402

from autopipe.trace.tape import Tape  # noqa: E402

GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "accepted": ("accepted", ACCEPTED), "discarded": ("accepted", DISCARDED), "quiet": ("accepted", QUIET),
    "unchanged": ("accepted", UNCHANGED), "common": ("refused", REFUSED), "places": ("refused", PLACES),
    "between": ("refused", BETWEEN), "objects": ("refused", OBJECTS), "settings": ("refused", SETTINGS),
}  # fmt: skip
_MANY = 30  # microbatches of a sample that are timed


def samples() -> list[tuple[str, int, float, float, float]]:
    """Return (sample, calls, ms of the first microbatch, ms of the second, median ms) of CPU time."""
    rows = []
    torch.set_num_threads(1)
    for name in BATCH:
        subject = captured(name)
        workload, graph = subject.workload, subject.capture.graph
        tape = Tape(workload, workload.build_model(empty=True))
        part = workload.split(next(iter(workload.items(BATCH[name]))), 2)[0]
        leaves = workload.leaves(part)
        sizes = {s.name: int(leaves[s.input].shape[s.dimension]) for s in graph.symbols}
        times = []
        for _ in range(_MANY):
            start = time.process_time()
            difference = tape.run(part, {"": (graph, sizes)})
            times.append(1000 * (time.process_time() - start))
            assert difference is None, (name, difference)
        rows.append((name, len(graph.nodes), times[0], times[1], statistics.median(times[2:])))
    return rows


def _place(where: Any) -> str:
    return "-" if where is None else f"{where[0]}.{where[1]}"


def _judged(old: str, row: dict[str, Any]) -> str:
    if "capture" in row:
        return "the capture refuses it"
    if isinstance(row["guard"], str) or isinstance(row.get("plain"), str):
        return "a process failed"
    where, text, _ = row["guard"]
    if text.startswith("not compared"):
        return text
    change = row.get("plain")
    if where is None:
        if change is not None:
            return "**missed**"
        return "equal" if old == "accepted" else "no change in these microbatches"
    if old == "accepted":
        return "**false difference**"
    if "plain" not in row:
        return "reported"
    if change is None:
        return "reported; plain training has no difference in these microbatches"
    return "reported there" if tuple(where) == tuple(change) else "reported before" if where < change else "**late**"


def written(rows: dict[str, dict[str, Any]]) -> str:
    """Return the page of results."""
    lines = [
        "# The Python of forward and loss, compared while training",
        "",
        "Written by `benchmarks/tape.py`. Minibatch and microbatch are counted from 0, with two microbatches in each.",
        "Plain training is that of the model beside that of the captured graph, which is captured here without the",
        "search for Python state. Where its column is empty, it was not run beside this table.",
        "",
        "## Samples",
        "",
        "| sample | calls | first microbatch, ms of CPU time | second | median of the others |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [f"| {n} | {c} | {a:.0f} | {b:.1f} | {m:.1f} |" for n, c, a, b, m in samples()]
    lines += ["", "## State cases", ""]
    lines += ["| the search | group | case | microbatches | plain training changes at | reported at | |"]
    lines += ["|---|---|---|---:|---:|---:|---|"]
    for name, row in rows.items():
        old, group = row["old"], row["group"]
        change = _place(row.get("plain")) if "plain" in row else ""
        guard = row.get("guard")
        where = _place(guard[0]) if isinstance(guard, list) else ""
        lines.append(f"| {old} | {group} | {name} | {row['microbatches']} | {change} | {where} | {_judged(old, row)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the cases that are missing, and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--group", action="append")
    parser.add_argument("--case", action="append")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rows = json.loads(options.rows.read_text()) if options.rows.exists() else {}
    for group, (old, cases) in GROUPS.items():
        for name, case in cases.items():
            chosen = group in (options.group or GROUPS) and name in (options.case or cases)
            if not chosen or name in rows:
                continue
            text = BASE + (case if isinstance(case, str) else case[0])
            row = guarded.row(text, options.steps, 2, plain=not options.quick)
            rows[name] = {"old": old, "group": group, "microbatches": 2 * options.steps, **row}
            print(group, name, _judged(old, rows[name]), flush=True)
            options.rows.write_text(json.dumps(rows))
    before = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
    RESULTS.write_text(written(rows) + "".join(before.partition("\n## Beside the ranks\n")[1:]))


if __name__ == "__main__":
    main()

"""Compare the planner with PipeDream's optimizer and with brute force, and time the search (``make bench-planner``).

Usage: ``python benchmarks/planner.py [--golden FOLDER] [--json FILE]``. PipeDream's cases are planned by its formulas.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results" / "planner.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.pipedream_cases import GOLDEN, golden_case  # noqa: E402

from autopipe.planning.search import bottleneck, solver  # noqa: E402 - the paths must be set first
from benchmarks.pipedream.model import plan_layers  # noqa: E402
from benchmarks.published.pipedream import table  # noqa: E402


def timed(call: Callable[[], Any], repeats: int = 3) -> tuple[float, Any]:
    """Return (least CPU seconds, result)."""
    best, result = float("inf"), None
    for _ in range(repeats):
        start = time.process_time()
        result = call()
        best = min(best, time.process_time() - start)
    return best, result


def golden(folder: Path, repeats: int) -> tuple[dict[str, Any], list[str]]:
    """Plan every case of PipeDream's table by its formulas; return the summary, and a table in Markdown."""
    with (folder / "golden.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    ratios, worse, lower, most = [], 0, 0, {1: 0.0, 2: 0.0, 3: 0.0}
    lines = [
        "| case | cost s | over PipeDream's | CPU s | PipeDream's CPU s | plan |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        layers, machine, straight = golden_case(row, folder)
        processor, plan = timed(
            lambda layers=layers, machine=machine, straight=straight: plan_layers(layers, machine, straight=straight),
            repeats,
        )
        cost, levels = plan.cost_seconds, len(machine.counts)
        theirs, before = float(row["pipedream_predicted_s"] or "nan"), float(row["prototype_cost_s"] or "nan")
        most[levels] = max(most[levels], processor)
        worse += cost > min(x for x in (theirs, before, 1e9) if x == x) * (1 + 1e-8) + 5e-10
        lower += cost < theirs * 0.999
        if row["optimizer_cpu_s"]:
            ratios.append(float(row["optimizer_cpu_s"]) / processor)
        ratio = "" if theirs != theirs else f"{cost / theirs:.4f}"
        lines.append(
            f"| {row['case']} | {cost:.7f} | {ratio} | {processor:.2f} | {row['optimizer_cpu_s']} "
            f"| {plan.configuration} |"
        )
        print(lines[-1], flush=True)
    summary = {
        "cases": len(rows),
        "worse than PipeDream or the prototype": worse,
        "lower than PipeDream by 0.1 percent": lower,
        "median of PipeDream's CPU seconds over ours": statistics.median(ratios),
        "most CPU seconds, one level of links": most[1],
        "most CPU seconds, several levels": max(most[2], most[3]),
    }
    print(summary, "\n")
    return summary, lines


def brute_force(cases: int) -> dict[str, int]:
    """Compare random small cases with brute force, and return the numbers of mismatches."""
    from pure.planning import test_replicated as replicated_cases
    from pure.planning import test_unreplicated as unreplicated_cases

    wrong = {"unreplicated": 0, "replicated": 0}
    for seed in range(cases):
        cost, expected, _ = replicated_cases.check(seed)
        wrong["replicated"] += not (cost == expected or abs(cost - expected) <= 1e-8 * expected)
        wrong["unreplicated"] += not unreplicated_cases.agrees(seed)
    print(f"brute force, {cases} cases of each kind, mismatches: {wrong}\n")
    return wrong


def layers(
    count: int, ranks: int, microbatches: int, *, flush: bool, may_recompute_by_block: bool = True
) -> bottleneck.Arrays:
    """Return a chain of heavy-tailed layers on equal 80 GB devices with 25 GB/s links.

    Recomputation is allowed, of stages and by block: every layer is a unit.
    """
    rng = np.random.default_rng(0)
    forward = rng.lognormal(-6.5, 0.7, count)
    backward = 2 * forward * rng.uniform(0.8, 1.2, count)
    saved = rng.lognormal(17.5, 0.8, count)
    weights = rng.lognormal(16, 1.2, count) * (rng.random(count) < 0.6)
    cut = np.concatenate([[0], rng.lognormal(16.5, 0.7, count - 1), [0]])

    def between(amounts: Any) -> Any:
        prefix = np.concatenate([[0], np.cumsum(amounts)])
        return np.maximum(prefix[None, :] - prefix[:, None], 0)

    received = np.broadcast_to(2 * cut[:, None], (count + 1, count + 1)).copy()
    sent = np.broadcast_to(2 * cut[None, :], (count + 1, count + 1)).copy()
    weight = between(weights)
    one = between(forward + backward) + (received + sent) / 25e9
    tables = (
        between(forward + backward), between(forward), received, sent, weight, np.zeros_like(weight), weight,
        3 * weight, between(saved), received / 2, one, 2 * weight / 25e9,
        3 * weight + saved.max(), between(cut[:count]), between(forward), np.zeros_like(weight),
        np.zeros_like(weight), np.zeros_like(weight), 3 * weight, 3 * weight + saved.max(),
    )  # fmt: skip
    rules = np.zeros(solver.NUM_RULES)
    for place, value in ((solver.MICROBATCHES, microbatches), (solver.RANKS, ranks), (solver.FLUSH, flush)):
        rules[place] = value
    rules[[solver.DEPTH, solver.MAY_KEEP, solver.MAY_RECOMPUTE, solver.EQUAL, solver.WIDTH]] = 1
    rules[solver.MAY_BLOCK] = may_recompute_by_block
    rules[solver.VERSIONS] = 1 if flush else 2
    rules[[solver.MOST, solver.UNIT]] = ranks, 1
    place = np.array([1, 80e9, 1 / 25e9, 0, 1 / 25e9, 0, 1 / 25e9, 0]).reshape(8, 1, 1)
    return bottleneck.Arrays(tables, place, rules.tolist(), np.arange(1, ranks + 1), 1.0)


def scale() -> dict[str, float]:
    """Time the search from tables to stages."""
    results = {}
    for count, ranks in [(500, 64), (500, 4096), (2000, 4096)]:
        case = layers(count, ranks, 2 * ranks, flush=False)
        seconds, _ = timed(lambda case=case: bottleneck.asynchronous(case))
        results[f"asynchronous {count} layers x {ranks}"] = seconds
    for count, ranks, m in [(200, 64, 8), (200, 64, 64), (200, 64, 512), (500, 64, 64)]:
        case = layers(count, ranks, m, flush=True)
        seconds, _ = timed(lambda case=case: bottleneck.flush(case, 0.01), 1)
        results[f"flush {count} layers x {ranks}, m={m}, 1 %"] = seconds
    for name, seconds in results.items():
        print(f"{name:45} {seconds:8.3f} s")
    return results


def markdown(results: dict[str, Any]) -> str:
    """Return the summary of a run."""
    lines = [
        "# The planner against PipeDream's optimizer, brute force and the clock",
        "",
        f"`make bench-planner`; {platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, numpy {np.__version__}. Load average of the machine: "
        f"{results['load'][0]:.1f} at the start, {results['load'][1]:.1f} at the end. "
        "PipeDream's CPU seconds are those recorded in its table.",
        "",
    ]
    if "published" in results:
        lines += [
            "## PipeDream's published speed-ups over data parallelism",
            "",
            "Planned and predicted from the profiles that PipeDream published, by PipeDream's formulas, which charge",
            "data parallelism four times its gradients and overlap nothing. Where the stages of a plan are groups of",
            "servers, its numbers count groups. Nothing is fitted to the published figures; the ratio is the predicted",
            "speed-up over the published one.",
            "",
            "The published figures are from memory or from secondary sources, and were not compared with the papers:",
            "they may be wrong. The plans are those of PipeDream's repository (`runtime`) where it has them, except",
            "for gnmt on 12 GPUs, which is 1-1-1-1-1-1-1-1-3-1 there. Bandwidths within a server are not published",
            "and are assumed (`benchmarks/published/pipedream.py`).",
            "",
            *results["published"],
            "",
        ]
    for title, name in (
        ("PipeDream's published profiles", "golden"),
        ("Mismatches with brute force", "brute_force"),
        ("CPU seconds of the search", "scale"),
    ):
        if name in results:
            lines += [f"## {title}", "", "| | |", "|---|---|"]
            lines += [f"| {key.replace('_', ' ')} | {value:.4g} |" for key, value in results[name].items()]
            lines.append("")
    if "cases" in results:
        lines += ["## Every case", "", *results["cases"], ""]
    return "\n".join(lines)


def main() -> None:
    """Run all comparisons, print the results and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    beside = GOLDEN if (GOLDEN / "golden.csv").exists() else None
    parser.add_argument("--golden", type=Path, default=beside, help="folder with golden.csv and PipeDream's profiles")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3, help="searches of each case; the fastest counts")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"load": [os.getloadavg()[0]]}
    if arguments.golden is not None:
        results["published"] = table(arguments.golden)
        print("\n".join(results["published"]), "\n")
        results["golden"], results["cases"] = golden(arguments.golden, arguments.repeats)
    else:
        print("without --golden: the comparisons with PipeDream are left out\n")
    results["brute_force"] = brute_force(arguments.cases)
    results["scale"] = scale()
    results["load"].append(os.getloadavg()[0])
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(markdown(results), encoding="utf-8")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Measure autopipe and its peers in turn, and write benchmarks/results/speed.md (``make bench``)."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.speed.case import Case, Options
from benchmarks.speed.cases.emulated import Emulated
from benchmarks.speed.cases.first_step import FirstStep
from benchmarks.speed.cases.generated import Generated
from benchmarks.speed.cases.growth import Growth
from benchmarks.speed.cases.host_cost import HostCost
from benchmarks.speed.cases.planner import Planner
from benchmarks.speed.cases.real import Real
from benchmarks.speed.cases.scripts import Scripts
from benchmarks.speed.report import Turn, page

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "speed.md"
GOLDEN = ROOT.parent / "shared" / "golden" / "pipedream"  # where the tests look for it, too
CASES: dict[str, Callable[[Options], Case]] = {
    "a": Real,
    "b": Emulated,
    "c": HostCost,
    "d": FirstStep,
    "e": Generated,
    "f": Growth,
    "g": Planner,
    "h": Scripts,
}


def measure(letters: str, rounds: int, options: Options, output: Path) -> None:
    """Run the rounds of some cases, and write the page after each: a user may stop the benchmark."""
    cases = {letter: CASES[letter](options) for letter in letters}
    turns: list[Turn] = []
    started: list[Case] = []
    for number in range(rounds):
        for letter, case in cases.items():
            before, begin = os.getloadavg()[0], time.perf_counter()
            case.round(number)
            turns.append(Turn(letter, before, os.getloadavg()[0], time.perf_counter() - begin))
            started += [] if case in started else [case]
            print(f"round {number + 1} of {rounds}, case ({letter}): {turns[-1].seconds:.0f} s", flush=True)
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(page(started, turns, quick=options.quick), encoding="utf-8")


def main() -> None:
    """Parse the arguments, measure, and print the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("--cases", default="".join(CASES), help=f"letters of {''.join(CASES)} [default: all]")
    parser.add_argument("--rounds", type=int, default=0, help="[default: 2; 1 with --quick]")
    parser.add_argument("--quick", action="store_true", help="the smallest run of each case, to see that it works")
    parser.add_argument("--golden", type=Path, default=GOLDEN, help="folder with PipeDream's profiles and golden.csv")
    parser.add_argument("--output", type=Path, help=f"[default: {RESULTS.relative_to(ROOT)}; none with --quick]")
    arguments = parser.parse_args()
    letters = arguments.cases.replace(",", "").replace(" ", "")
    if unknown := set(letters) - CASES.keys():
        parser.error(f"--cases {arguments.cases}: unknown {', '.join(sorted(unknown))}; choose from {''.join(CASES)}")
    golden = arguments.golden.resolve()
    with tempfile.TemporaryDirectory(prefix="autopipe-speed-") as folder:
        options = Options(
            folder=Path(folder),
            quick=arguments.quick,
            golden=golden if (golden / "golden.csv").exists() else None,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )
        output = arguments.output or (Path(folder) / "speed.md" if arguments.quick else RESULTS)
        measure(letters, arguments.rounds or (1 if arguments.quick else 2), options, output)
        print(output.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()

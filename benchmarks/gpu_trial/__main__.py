"""``make gpu-trial``: what should hold on GPUs, tried on this machine, into benchmarks/results/gpu.md.

Every trial runs ``autopipe`` in fresh processes, as users do, with a time limit of its own. If there are fewer GPUs
than ranks, the ranks share them: over NCCL if its version supports that (2.30 and later, NCCL_MULTI_RANK_GPU_ENABLE),
else through host memory. The page is written after every trial. ``--device cpu`` rehearses the trials without a GPU,
and writes to the file that ``--output`` names.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu_trial.bench import Bench, TrialError, versions
from benchmarks.gpu_trial.report import Outcome, page, write
from benchmarks.gpu_trial.trials import Trial, train, trials

RESULTS = Path(__file__).resolve().parents[1] / "results" / "gpu.md"
NEEDED = ("click", "rich", "pandas", "numpy", "safetensors", "psutil")
SHARED = {"AUTOPIPE_SHARED_GPU": "nccl", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
HOST = {"AUTOPIPE_SHARED_GPU": "host"}


def main() -> int:
    """Run the trials. Return the number of those that did not hold."""
    parser = argparse.ArgumentParser(prog="gpu-trial", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=38.0, help="time for all trials")
    parser.add_argument("--seconds", type=float, default=180.0, help="time for one trial")
    parser.add_argument("--only", default="", help="trials whose names contain one of these words, separated by commas")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    problem = _problem(options)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    end = time.monotonic() + 60 * options.minutes
    outcomes: list[Outcome] = []

    def record(outcome: Outcome) -> None:
        outcomes.append(outcome)
        write(options.output, page(outcomes, machine, title))
        print(f"{outcome.name:28} {outcome.result:13} {outcome.seconds:5.0f} s  {outcome.detail[:160]}", flush=True)

    cuda = options.device == "cuda"
    machine = [*versions(), ("ranks", str(options.ranks))]
    title = "What holds on GPUs" if cuda else "Rehearsal of the GPU trial on a CPU"
    environment: dict[str, str] = {}
    if cuda and torch.cuda.device_count() < options.ranks:
        first = run(Trial("NCCL on a shared GPU", "trains", train), options, SHARED)
        environment = SHARED if first.result == "held" else HOST
        record(first)
    words = [word for word in options.only.split(",") if word]
    for trial in trials(options.device):
        if words and not any(word in trial.name for word in words):
            continue
        if time.monotonic() > end - 20:
            record(Outcome(trial.name, trial.expected, "not run", f"{options.minutes:g} minutes are over"))
        else:
            record(run(trial, options, environment, end))
    return sum(outcome.result == "did not hold" for outcome in outcomes)


def run(trial: Trial, options: argparse.Namespace, environment: dict[str, str], end: float = float("inf")) -> Outcome:
    """Run one trial in a new folder."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-trial-") as folder:
        bench = Bench(Path(folder), options.device, options.ranks, environment, options.seconds)
        bench.end = min(begin + options.seconds, end)
        try:
            result, detail = "held", trial.run(bench)
        except TrialError as failure:
            result, detail = "did not hold", str(failure)
    return Outcome(trial.name, trial.expected, result, detail, time.monotonic() - begin)


def _problem(options: argparse.Namespace) -> str:
    """Return why the trials cannot run, or ""."""
    missing = []
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        return f"{sys.executable} lacks {', '.join(missing)}\n  try: install them, or name another one: PYTHON=..."
    if options.device == "cuda" and not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no GPU on this machine, so nothing was run.\n"
            "  try: make gpu-trial ARGUMENTS='--device cpu --output rehearsal.md' rehearses the trials on a CPU"
        )
    if options.device == "cpu" and options.output == RESULTS:
        return f"a rehearsal does not overwrite {RESULTS.name}; name another file with --output"
    return ""


if __name__ == "__main__":
    sys.exit(main())

"""``make gpu-trial``: what should hold on GPUs, tried on this machine, into benchmarks/results/gpu.md.

Every trial runs ``autopipe`` in fresh processes, as users do, with a time limit of its own. If there are fewer GPUs
than ranks, the ranks share them: over NCCL if its version supports that (2.30 and later, NCCL_MULTI_RANK_GPU_ENABLE),
else through host memory. The page is written after every trial. ``--device cpu`` rehearses the trials without a GPU,
and writes to the file that ``--output`` names.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.gpu_trial.bench import Bench, NotRunError, TrialError, versions
from benchmarks.gpu_trial.report import Outcome, page, write
from benchmarks.gpu_trial.trials import Trial, profile, train, trials

RESULTS = Path(__file__).resolve().parents[1] / "results" / "gpu.md"
NEEDED = ("click", "rich", "pandas", "numpy", "safetensors", "psutil")
OVER = {
    "nccl": {"AUTOPIPE_SHARED_GPU": "nccl", "NCCL_MULTI_RANK_GPU_ENABLE": "1"},
    "host": {"AUTOPIPE_SHARED_GPU": "host"},
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What all trials have in common."""

    device: str
    ranks: int
    seconds: float  # for a trial
    environment: Mapping[str, str] = field(default_factory=dict)
    loops: Path | None = None  # folder for the weights of plain loops
    profile: Path | None = None  # work directory with the profile of the trials' model
    logs: Path | None = None  # file for what the commands and ranks of failed trials print

    def bench(self, folder: Path, end: float = float("inf")) -> Bench:
        """Return the bench of a trial, which ends at ``end`` or when its time is over."""
        bench = Bench(folder, self.device, self.ranks, dict(self.environment), self.seconds)
        bench.loops = self.loops
        bench.end = min(time.monotonic() + self.seconds, end)
        return bench


def main() -> int:
    """Run the trials. Return the number of those that did not hold."""
    parser = argparse.ArgumentParser(prog="gpu-trial", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=38.0, help="time for all trials")
    parser.add_argument("--seconds", type=float, default=180.0, help="time for one trial")
    parser.add_argument("--over", choices=("auto", *OVER), default="auto", help="how ranks of one GPU exchange")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time; those of times follow, one at a time")
    parser.add_argument("--logs", type=Path, help="file for what the commands and ranks of failed trials print")
    parser.add_argument("--only", default="", help="trials whose names contain one of these words, separated by commas")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: there must be at least 1")
    problem = _problem(options)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    end = time.monotonic() + 60 * options.minutes
    outcomes: list[Outcome] = []
    cuda = options.device == "cuda"
    machine = [*versions(), ("ranks", str(options.ranks))]
    title = "What holds on GPUs" if cuda else "Rehearsal of the GPU trial on a CPU"

    def record(outcome: Outcome) -> Outcome:
        outcomes.append(outcome)
        write(options.output, page(outcomes, machine, title))
        print(f"{outcome.name:28} {outcome.result:13} {outcome.seconds:5.0f} s  {outcome.detail[:160]}", flush=True)
        return outcome

    with tempfile.TemporaryDirectory(prefix="gpu-trial-") as scratch:
        setting = Setting(options.device, options.ranks, options.seconds, loops=Path(scratch), logs=options.logs)
        measured = Trial("profile", "measures the model", lambda bench: profile(bench, Path(scratch) / "profile"))
        if record(run(measured, setting, end)).result == "held":
            setting = replace(setting, profile=Path(scratch) / "profile")
        if cuda and torch.cuda.device_count() < options.ranks:
            over = options.over
            if over == "auto":
                shared = Trial("NCCL on a shared GPU", "trains", train)
                first = record(run(shared, replace(setting, environment=OVER["nccl"]), end))
                over = "nccl" if first.result == "held" else "host"
            setting = replace(setting, environment=OVER[over])
        words = [word for word in options.only.split(",") if word]
        chosen = [trial for trial in trials(options.device) if not words or any(word in trial.name for word in words)]
        with ThreadPoolExecutor(options.jobs) as pool:
            try:
                futures = [pool.submit(run, trial, setting, end) for trial in chosen if not trial.alone]
                for future in as_completed(futures):
                    record(future.result())
            except BaseException:  # such as Ctrl-C
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        for trial in chosen:
            if trial.alone:
                record(run(trial, setting, end))
    return sum(outcome.result == "did not hold" for outcome in outcomes)


def run(trial: Trial, setting: Setting, end: float = float("inf")) -> Outcome:
    """Run one trial in a new folder, unless the time is over."""
    begin = time.monotonic()
    if begin > end - 20:
        return Outcome(trial.name, trial.expected, "not run", "the time for all trials is over")
    with tempfile.TemporaryDirectory(prefix="gpu-trial-") as folder:
        bench = setting.bench(Path(folder), end)
        if setting.profile is not None:
            shutil.copytree(setting.profile, bench.work_dir)
        try:
            result, detail = "held", trial.run(bench)
        except NotRunError as reason:
            result, detail = "not run", str(reason)
        except Exception as failure:  # whatever it is, the other trials are worth running
            result, detail = "did not hold", str(failure) if isinstance(failure, TrialError) else repr(failure)
        if result == "did not hold" and setting.logs is not None:
            with contextlib.suppress(OSError), setting.logs.open("a", encoding="utf-8") as logs:
                logs.write(f"==== {trial.name}: {detail}\n{bench.output()}\n")
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

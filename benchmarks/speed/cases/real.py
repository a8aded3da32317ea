"""(a) Real compute on two ranks of one thread: autopipe, torch's schedules on the same cut, and the plain loop."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.speed.awake import cores_awake
from benchmarks.speed.case import Options, pipeline_words
from benchmarks.speed.running import (
    LIMIT_SECONDS,
    MODELS,
    ROOT,
    SAMPLES,
    equal_losses,
    peer_command,
    plan_of,
    prepare,
    train_command,
)
from benchmarks.speed.spread import Spread, ratios, verdict
from benchmarks.speed.turns import Training, take_turns

TOLERANCE = 1e-3  # of a loss after some steps: torch adds the gradients of a minibatch in another order
MICROBATCHES = 8
TURNS = 8  # of each training, in a round
COMPARED_STEPS = 20  # whose losses are compared; later ones differ by the order of sums
TARGETS = {"gpt": SAMPLES / "gpt.py", "resnet": MODELS / "resnet.py", "hf_llama": SAMPLES / "hf_llama.py"}
# minibatch, seconds of a turn
SIZES = {"gpt": (64, 6.0), "resnet": (128, 2.0), "hf_llama": (32, 4.0)}
OURS = ("1f1b", "auto", "interleaved")
# system and the plan whose stages it runs
THEIRS = {
    "plain": ("plain", "1f1b"),
    "gpipe": ("gpipe", "1f1b"),
    "1f1b": ("1f1b", "1f1b"),
    "1f1b of auto": ("1f1b", "auto"),
    "interleaved": ("interleaved", "interleaved"),
}
# ours, theirs, bar
COMPARED = (
    ("1f1b", "1f1b", 1.05),
    ("auto", "1f1b of auto", 1.05),
    ("auto", "1f1b", 0.0),
    ("auto", "gpipe", 0.0),
    ("interleaved", "interleaved", 0.0),
    ("auto", "plain", 0.0),
)
NAMES = {
    "plain": "plain loop",
    "gpipe": "torch GPipe",
    "1f1b": "torch 1F1B",
    "1f1b of auto": "torch 1F1B at the cut of auto",
    "interleaved": "torch Interleaved1F1B",
}


def _runs(spec: Mapping[str, Any]) -> bool:
    """Return whether a peer trains: torch does not send and receive all values that stages exchange."""
    Path(spec["folder"]).mkdir(parents=True)
    command = peer_command([spec])
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=LIMIT_SECONDS).returncode == 0


class Real:
    """The case."""

    title = "(a) Real compute, two ranks of one thread"

    def __init__(self, options: Options) -> None:
        self.options = options
        self.works: dict[str, dict[str, Path]] = {}
        self.times: dict[tuple[str, str, str], list[float]] = {}  # model, "autopipe" or "other", system
        self.differences: dict[str, float] = {}

    def round(self, number: int) -> None:
        """Train every model under every system, on cores that do not halt."""
        with cores_awake():
            self._round(number)

    def _round(self, number: int) -> None:
        """The order of the trainings alternates from turn to turn, and from round to round."""
        for model in ("gpt",) if self.options.quick else SIZES:
            batch_size, seconds = SIZES[model]
            words = [*pipeline_words(2, MICROBATCHES, batch_size)]
            sizes = ["--microbatch-sizes", str(batch_size // MICROBATCHES)]
            target = TARGETS[model]
            if model not in self.works:
                plans = {plan: [*words, "--schedule", plan] for _, plan in THEIRS.values()}
                self.works[model] = prepare(self.options.folder / model, target, sizes, plans)
            works, folder = self.works[model], self.options.folder / model / f"round-{number}"
            trainings: dict[tuple[str, str], Training] = {}
            for name in OURS:
                run = folder / f"autopipe-{name}" / "run"
                given = [*words, *sizes, "--schedule", name, "--watchdog", "1000000"]  # it is suspended for minutes
                command = train_command(works[name], target, given, 10**6, run)
                trainings["autopipe", name] = Training(f"autopipe {name}", command, run.parent, run / "metrics.jsonl")
            for name, (system, plan) in THEIRS.items():
                place = folder / f"other-{name.replace(' ', '-')}"
                spec = {"system": system, "work": str(works[plan]), "folder": str(place)}
                if plan == "auto" and not _runs({**spec, "steps": 2, "folder": f"{place}-first"}):
                    continue
                command = peer_command([{**spec, "steps": None}])
                trainings["other", name] = Training(NAMES[name], command, place, place / "metrics.jsonl")
            order = list(trainings.values())
            take_turns(order if number % 2 == 0 else order[::-1], self.options.steps(TURNS, 1), seconds)
            ours = trainings["autopipe", "1f1b"].losses[:COMPARED_STEPS]
            for (side, name), training in trainings.items():
                what = f"{training.name} and autopipe 1f1b on {model}"
                difference = equal_losses(training.losses, ours, TOLERANCE, what)
                self.differences[model] = max(difference, self.differences.get(model, 0.0))
                self.times.setdefault((model, side, name), []).extend(training.turns)

    def _auto(self, model: str) -> str:
        """Return the schedule that the planner chose, and whether its cut is the one that the peers run."""
        plan, other = plan_of(self.works[model]["auto"]), plan_of(self.works[model]["1f1b"])
        cuts = [[stage.start for stage in either.stages] for either in (plan, other)]
        return f"auto: {plan.schedule}" + ("" if cuts[0] == cuts[1] else ", its own cut")

    def lines(self) -> list[str]:
        """Return the table."""
        lines = [
            f"{MICROBATCHES} microbatches; minibatches of "
            + ", ".join(f"{size} ({model})" for model, (size, _) in SIZES.items())
            + ".",
            "torch runs the stage modules that autopipe generated for its plan of the same name, or for that of",
            "--schedule auto, which may have another cut, and adds the",
            "gradients of the tied embedding of gpt itself. A ratio above 1 means that autopipe is faster. A process",
            "of idle priority spins on each core, for all systems, so that no core of a virtual machine halts.",
            f"The trainings of a model take {TURNS} turns of 2 to 6 s in a round, while the others are suspended. A",
            "ratio is that of two turns which are seconds apart.",
            "",
            "| model | autopipe | s a step | compared with | s a step | ratio (quartiles) | bar |",
            "|---|---|---|---|---|---|---|",
        ]
        for model in self.works:
            for ours, theirs, bar in COMPARED:
                a, b = self.times[model, "autopipe", ours], self.times.get((model, "other", theirs))
                if b is None:
                    lines.append(f"| {model} | {self._auto(model)} | | {NAMES[theirs]} | torch fails | | |")
                    continue
                ratio = ratios(b, a)
                name = self._auto(model) if ours == "auto" else ours
                passed = verdict(ratio.middle, bar, at_least=True) if bar else ""
                cells = f"{Spread.of(a).middle:.4f} | {NAMES[theirs]} | {Spread.of(b).middle:.4f}"
                lines.append(f"| {model} | {name} | {cells} | {ratio.text()} | {passed} |")
        worst = ", ".join(f"{value:.1e} ({model})" for model, value in self.differences.items())
        return [*lines, "", f"Largest relative difference of a loss between autopipe and the others: {worst}."]

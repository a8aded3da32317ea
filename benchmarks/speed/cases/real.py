"""(a) Real compute on two ranks of one thread: autopipe, torch's schedules on the same cut, and the plain loop."""

from __future__ import annotations

from pathlib import Path

from benchmarks.speed.awake import cores_awake
from benchmarks.speed.case import Options, pipeline_words
from benchmarks.speed.running import SAMPLES, Run, plan_of, prepare, same_losses, train, train_peers
from benchmarks.speed.spread import Spread, ratios, step_times, verdict

TOLERANCE = 1e-3  # of a loss after some steps: torch adds the gradients of a minibatch in another order
MICROBATCHES = 8
# minibatch, steps; resnet: no ragged minibatch, which torch does not split
SIZES = {"gpt": (64, 12), "resnet": (128, 10), "hf_llama": (32, 20)}
OURS = ("1f1b", "auto", "interleaved")
# system -> the plan whose stages it runs
THEIRS = {"plain": "1f1b", "gpipe": "1f1b", "1f1b": "1f1b", "interleaved": "interleaved"}
# ours, theirs, bar
COMPARED = (
    ("1f1b", "1f1b", 1.05),
    ("auto", "1f1b", 1.05),
    ("auto", "gpipe", 0.0),
    ("interleaved", "interleaved", 0.0),
    ("auto", "plain", 0.0),
)
NAMES = {"plain": "plain loop", "gpipe": "torch GPipe", "1f1b": "torch 1F1B", "interleaved": "torch Interleaved1F1B"}


class Real:
    """The case."""

    title = "(a) Real compute, two ranks of one thread"

    def __init__(self, options: Options) -> None:
        self.options = options
        self.works: dict[str, dict[str, Path]] = {}
        self.times: dict[tuple[str, str, str], list[float]] = {}  # model, "autopipe" or "other", system
        self.differences: dict[str, float] = {}

    def round(self, number: int) -> None:
        """Train every model under every system once, on cores that do not halt."""
        with cores_awake():
            self._round(number)

    def _round(self, number: int) -> None:
        """Which side is first alternates from round to round."""
        for model in ("gpt",) if self.options.quick else SIZES:
            batch_size, steps = SIZES[model]
            words = [*pipeline_words(2, MICROBATCHES, batch_size)]
            sizes = ["--microbatch-sizes", str(batch_size // MICROBATCHES)]
            target = SAMPLES / f"{model}.py"
            if model not in self.works:
                plans = {name: [*words, "--schedule", name] for name in dict.fromkeys(THEIRS.values())}
                self.works[model] = prepare(self.options.folder / model, target, sizes, plans, ["auto"])
            works, count = self.works[model], self.options.steps(steps, 5)
            specs = [{"system": name, "work": str(works[cut]), "steps": count} for name, cut in THEIRS.items()]
            ours: dict[str, Run] = {}
            theirs: dict[str, Run] = {}
            for side in ("autopipe", "other") if number % 2 == 0 else ("other", "autopipe"):
                if side == "other":
                    theirs = dict(zip(THEIRS, train_peers(specs, self.options.folder), strict=True))
                else:
                    for name in OURS:
                        ours[name] = train(works[name], target, [*words, *sizes, "--schedule", name], count)
            for name, run in ours.items():
                self._add(model, "autopipe", name, run)
            for name, run in theirs.items():
                difference = same_losses(run, ours["1f1b"], TOLERANCE, f"{NAMES[name]} and autopipe on {model}")
                self.differences[model] = max(difference, self.differences.get(model, 0.0))
                self._add(model, "other", name, run)

    def _add(self, model: str, side: str, name: str, run: Run) -> None:
        self.times.setdefault((model, side, name), []).extend(step_times(run.ends))

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
            "torch runs the stage modules that autopipe generated for its plan of the same name, and adds the",
            "gradients of the tied embedding of gpt itself. A ratio above 1 means that autopipe is faster. A process",
            "of idle priority spins on each core, for all systems, so that no core of a virtual machine halts.",
            "",
            "| model | autopipe | s a step | compared with | s a step | ratio (quartiles) | bar |",
            "|---|---|---|---|---|---|---|",
        ]
        for model in self.works:
            for ours, theirs, bar in COMPARED:
                a, b = self.times[model, "autopipe", ours], self.times[model, "other", theirs]
                ratio = ratios(b, a)
                name = self._auto(model) if ours == "auto" else ours
                passed = verdict(ratio.middle, bar, at_least=True) if bar else ""
                cells = f"{Spread.of(a).middle:.4f} | {NAMES[theirs]} | {Spread.of(b).middle:.4f}"
                lines.append(f"| {model} | {name} | {cells} | {ratio.text()} | {passed} |")
        worst = ", ".join(f"{value:.1e} ({model})" for model, value in self.differences.items())
        return [*lines, "", f"Largest relative difference of a loss between autopipe and the others: {worst}."]

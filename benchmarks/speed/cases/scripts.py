"""(h) A script that accumulates gradients: `autopipe run`, `autopipe train` of the same model, and `python`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from benchmarks.speed.case import Options, pipeline_words
from benchmarks.speed.running import AUTOPIPE, MODELS, SAMPLES, Run, execute, prepare, same_losses, train
from benchmarks.speed.spread import Spread, ratios, step_times, verdict

SCRIPT = MODELS / "accumulating.py"
ACCUMULATED = 8
BATCH, QUICK_BATCH = 16, 2  # 16: 0.5 s a batch
WIDTH = 256
TOLERANCE = 1e-3  # of a loss after some steps: train adds the gradients of a minibatch in another order
BAR = 0.85


class Scripts:
    """The case."""

    title = "(h) A script with accumulation, two ranks of one thread"

    def __init__(self, options: Options) -> None:
        self.options = options
        self.batch = QUICK_BATCH if options.quick else BATCH
        self.work: Path | None = None
        self.times: dict[str, list[float]] = {}  # system -> seconds of steps
        self.cuts: dict[str, list[str]] = {}  # system -> the first parameter of each stage
        self.difference = 0.0

    def round(self, number: int) -> None:
        """Train once under each system; the order turns from round to round."""
        folder, steps = self.options.folder, self.options.steps(6, 4)
        words = [*pipeline_words(2, ACCUMULATED, self.batch * ACCUMULATED), "--schedule", "1f1b"]
        model = ["--arg", f"width={WIDTH}", "--microbatch-sizes", str(self.batch)]
        target = SAMPLES / "gpt.py"
        if self.work is None:
            self.work = prepare(folder / "script", target, model, {"plan": words})["plan"]
        arguments = [str(SCRIPT), "--steps", str(steps), "--batch-size", str(self.batch), "--width", str(WIDTH)]
        stages = folder / f"script-stages-{number}"
        staged = [AUTOPIPE, "run", "--gpus", "2", "--check", "0", "--stages-dir", str(stages)]
        commands = {
            "python": [sys.executable, *arguments],
            "run": [*staged, arguments[0], "--", *arguments[1:]],
        }
        runs: dict[str, Run] = {}
        systems = ["python", "run", "train"]
        for system in systems[number % 3 :] + systems[: number % 3]:
            if system == "train":
                runs[system] = train(self.work, target, [*words, *model], steps)
            else:
                lines = [json.loads(line) for line in execute(commands[system], folder).splitlines()]
                runs[system] = Run([line["seconds"] for line in lines], [line["loss"] for line in lines], [])
            self.times.setdefault(system, []).extend(step_times(runs[system].ends))
        if runs["run"].losses != runs["python"].losses:
            raise SystemExit(f"the script prints other losses in stages: {runs['run'].losses} {runs['python'].losses}")
        self.difference = same_losses(runs["train"], runs["python"], TOLERANCE, "autopipe train and the script")
        self.cuts = {"run": _cut(stages), "train": _cut(self.work / "stages")}

    def lines(self) -> list[str]:
        """Return the table."""
        if not self.times:
            return []
        ratio = ratios(self.times["train"], self.times["run"])
        same = self.cuts["run"] == self.cuts["train"]
        lines = [
            f"The GPT of sample_models, width {WIDTH}, {ACCUMULATED} batches of {self.batch} a step;",
            ("both in stages with the same cut." if same else f"cuts: {self.cuts}.") + " The losses of `autopipe run`",
            f"are those of `python`, bit for bit; those of `autopipe train` differ by {self.difference:.1e}.",
            "",
            "| system | s a step (quartiles) | speed over `autopipe train` | bar |",
            "|---|---|---|---|",
        ]
        for system, figures in self.times.items():
            more = ratios(self.times["train"], figures).text() if system != "train" else ""
            bar = verdict(ratio.middle, BAR, at_least=True) if system == "run" else ""
            lines.append(f"| `{system}` | {Spread.of(figures).text()} | {more} | {bar} |")
        return lines


def _cut(folder: Path) -> list[str]:
    """Return the blocks that each stage file names, such as ``0 1 2``; a cut within a block has it in both."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("**/stage_*.py"))]
    return [" ".join(sorted(set(re.findall(r"blocks[.\[](\d+)", text)))) for text in texts]

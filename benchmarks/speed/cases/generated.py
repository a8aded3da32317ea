"""(e) The generated stage against the eager model: forward and backward of the complete model in one stage."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.speed.case import Options
from benchmarks.speed.running import SAMPLES, execute, prepare
from benchmarks.speed.spread import Spread, verdict

MODELS = ("gpt", "resnet", "hf_llama")
BATCH, BAR = 8, 1.02


class Generated:
    """The case."""

    title = "(e) The generated stage against the eager model"

    def __init__(self, options: Options) -> None:
        self.options = options
        self.devices = ("cpu",) if options.device == "cpu" else ("cpu", options.device)
        self.works: dict[str, Path] = {}
        self.pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}  # (model, device) -> eager, stage

    def round(self, number: int) -> None:
        """Time both in turn in one process, for each model and device, in the first round."""
        if number:
            return
        for model in ("resnet",) if self.options.quick else MODELS:
            if model not in self.works:
                words = ["--gpus", "1", "--batch-size", str(BATCH), "--num-microbatches", "1", "--replicas", "never"]
                plans = {"one": [*words, "--schedule", "1f1b"]}
                folder, sizes = self.options.folder / f"one-{model}", ["--microbatch-sizes", str(BATCH)]
                self.works[model] = prepare(folder, SAMPLES / f"{model}.py", sizes, plans)["one"]
            for device in self.devices:
                repeats = str(self.options.steps(40, 8))
                command = [sys.executable, "-m", "benchmarks.speed.in_turn", str(self.works[model]), device, repeats]
                pairs = json.loads(execute(command, self.options.folder))
                self.pairs.setdefault((model, device), []).extend((eager, stage) for eager, stage in pairs)

    def lines(self) -> list[str]:
        """Return the table."""
        lines = [
            f"One stage, a batch of {BATCH}, one thread, in turn in one process; on a CPU the processor time of the",
            "process. Both give the same loss to the last bit on a CPU.",
            "",
            "| model | device | eager ms | stage ms | stage / eager (quartiles) | bar |",
            "|---|---|---|---|---|---|",
        ]
        for (model, device), pairs in self.pairs.items():
            eager, stage = (Spread.of([s * 1e3 for s in column]) for column in zip(*pairs, strict=True))
            ratio = Spread.of([b / a for a, b in pairs])
            bar = verdict(ratio.middle, BAR, at_least=False)
            lines.append(f"| {model} | {device} | {eager.middle:.2f} | {stage.middle:.2f} | {ratio.text()} | {bar} |")
        return lines

"""(d) From the command to the first step: with nothing prepared, and with profile, plan and stages in place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.speed.case import Options, pipeline_words
from benchmarks.speed.running import AUTOPIPE, SAMPLES, execute, first_step
from benchmarks.speed.spread import Spread, verdict

TARGET = SAMPLES / "gpt.py"
BAR_SECONDS = 1.5
IMPORT = """
import json, sys, time
begin = time.perf_counter()
import importlib.util, torch
spec = importlib.util.spec_from_file_location("model", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.build_model()
print(json.dumps([time.perf_counter() - begin, time.process_time()]))
"""


class FirstStep:
    """The case."""

    title = "(d) From the command to the first step"

    def __init__(self, options: Options) -> None:
        self.options = options
        self.ranks = (2,) if options.quick else (2, 4, 8, 16)
        self.rows: dict[tuple[str, int], list[tuple[float, float]]] = {}  # (what, ranks) -> wall, processor

    def round(self, number: int) -> None:
        """Start each training once from nothing, in the first round, and once with everything prepared."""
        folder = self.options.folder
        answer = json.loads(execute([sys.executable, "-c", IMPORT, str(TARGET)], folder))
        self.rows.setdefault(("import", 0), []).append((answer[0], answer[1]))
        for ranks in self.ranks:
            work = folder / f"first-{ranks}"
            if number == 0:
                self._start("cold", ranks, work, number)
            self._start("prepared", ranks, work, number)

    def _start(self, what: str, ranks: int, work: Path, number: int) -> None:
        run = self.options.folder / f"first-run-{what}-{ranks}-{number}"
        command = [AUTOPIPE, "train", str(TARGET), "--device", "cpu", "--work-dir", str(work), "--run-dir", str(run)]
        words = [*pipeline_words(ranks, 16, 16), "--schedule", "1f1b", "--microbatch-sizes", "1"]
        figures = first_step(
            [*command, *words, "--no-check", "--steps", "1"], self.options.folder, run / "metrics.jsonl"
        )
        self.rows.setdefault((what, ranks), []).append(figures)

    def lines(self) -> list[str]:
        """Return the table."""
        if not self.rows:
            return []
        base, base_processor = (Spread.of(column) for column in zip(*self.rows["import", 0], strict=True))
        lines = [
            f"`autopipe train {TARGET.name}`, 1f1b, 16 microbatches of 1. Processor time is that of all processes of",
            "the command. `import torch`, the model file and `build_model()` in a fresh process:",
            f"{base.text('.2f')} s wall, {base_processor.text('.2f')} s processor.",
            "",
            "| ranks | start | wall s (quartiles) | over import and build | processor s (quartiles) | bar |",
            "|---|---|---|---|---|---|",
        ]
        for (what, ranks), figures in sorted(self.rows.items(), key=lambda row: (row[0][1], row[0][0])):
            if what == "import":
                continue
            wall, processor = (Spread.of(column) for column in zip(*figures, strict=True))
            more = wall.middle - base.middle
            bar = verdict(more, BAR_SECONDS, at_least=False) if what == "prepared" else ""
            cells = f"{wall.text('.2f')} | {more:.2f} s | {processor.text('.2f')} | {bar}"
            lines.append(f"| {ranks} | {what} | {cells} |")
        return lines

"""The display of a run in progress: at most ``MOST_RANKS`` and three lines, of at most ``MOST_COLUMNS`` columns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autopipe.errors import counted
from autopipe.report.text import time_to_go

# a terminal that becomes narrower breaks the lines that are on it: none is longer than a usual terminal is wide
MOST_COLUMNS = 79
MOST_RANKS = 8
BAR = 28
_INSTRUCTION = re.compile(r"\d+[A-Z]")
_WORDS = {"saving": "saving", "stopping": "stopping", "loss": "training", "agree": "training"}
_STYLES = {"training": "green", "waiting": "dim", "failed": "red", "saving": "cyan", "evaluating": "cyan"}


@dataclass(slots=True)
class RunDisplay:
    """The state of a run, from its events."""

    start: Mapping[str, Any] = field(default_factory=dict)
    step: Mapping[str, Any] = field(default_factory=dict)
    states: tuple[str, ...] = ()
    activity: str = ""  # before the ranks start, or what all of them do
    fraction: float = 0.0  # of the activity
    checkpoint: int = -1  # the step of the newest
    failed: int = -1  # the rank that failed, until the next attempt trains

    def take(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Take an event."""
        if kind == "progress":
            self.activity, self.fraction = fields["what"], fields["fraction"]
        elif kind == "start":
            self.start, self.activity = fields, ""
        elif kind == "step":
            self.step, self.failed = fields, -1
            self.activity = "" if self.activity != "stopping" else self.activity
        elif kind == "ranks":
            self.states = tuple(fields["states"])
        elif kind == "checkpoint":
            self.checkpoint = fields["step"]
        elif kind == "evaluating":
            self.activity = "evaluating"
        elif kind == "evaluation":
            self.activity = ""
        elif kind == "stopping":
            self.activity = "stopping"
        elif kind == "restart":
            self.failed = fields["rank"]

    def renderable(self, width: int) -> RenderableType:
        """Return the lines, for a terminal of ``width`` columns."""
        columns = max(min(width - 1, MOST_COLUMNS), 1)
        lines = [*self._lines(columns)]
        for line in lines:
            if isinstance(line, Text):
                line.truncate(columns)
                line.no_wrap = True
        return Group(*lines)

    def _lines(self, columns: int) -> Iterator[RenderableType]:
        if self.activity and not self.start:
            yield _bar_line(self.activity, self.fraction, f"{self.fraction:.0%}", columns)
        if self.start:
            yield self._progress(columns)
            if self.step:
                yield Text("  ".join(self._figures()))
            yield from self._ranks()

    def _progress(self, columns: int) -> RenderableType:
        begin, steps = self.start["start_step"], self.start["steps"]
        done = self.step["step"] + 1 if self.step else begin
        left = time_to_go(self.start, self.step) if self.step else ""
        if not steps:
            return Text(f"step {done}  {left}")
        return _bar_line(f"step {done}/{steps}", done / steps, "  ".join((f"{done / steps:.0%}", left)), columns)

    def _figures(self) -> Iterator[str]:
        yield f"loss {self.step['loss']:.6f}"
        rate = self.step["samples_per_second"]
        yield f"{rate:.1f} samples/s"
        if (unit := self.start.get("unit_mfu")) is not None:
            yield f"MFU {unit * rate:.1%}"
        yield f"checkpoint: step {self.checkpoint}" if self.checkpoint >= 0 else "no checkpoint yet"

    def _ranks(self) -> Iterator[Text]:
        words = [self._word(rank, state) for rank, state in enumerate(self.states)]
        if len(words) > MOST_RANKS:
            counts = Counter(words).most_common()
            yield Text(f"{counted(len(words), 'rank')}: {', '.join(f'{count} {word}' for word, count in counts)}")
            return
        stages = list(zip(self.start.get("modules", ()), self.start.get("stage_ranks", ()), strict=True))
        for rank, (word, state) in enumerate(zip(words, self.states, strict=True)):
            names = "; ".join(name for name, ranks in stages if rank in ranks)
            instruction = state.removeprefix("waits in ")
            instruction = instruction if _INSTRUCTION.match(instruction) else ""
            yield Text.assemble(
                f"rank {rank:<2} ", (f"{word:<10} ", _STYLES.get(word, "")), f"{instruction:<9} ", (names, "dim")
            )

    def _word(self, rank: int, state: str) -> str:
        """Return what a rank does, in one word."""
        if rank == self.failed:
            return "failed"
        waits, doing = state.startswith("waits in "), state.removeprefix("waits in ")
        if _WORDS.get(doing, "training") != "training":
            return _WORDS[doing]
        if not (doing in _WORDS or _INSTRUCTION.match(doing)):
            return "training" if self.step and doing.startswith("reading data") else "starting"
        return self.activity or ("waiting" if waits else "training")


def _bar_line(text: str, fraction: float, more: str, columns: int) -> RenderableType:
    """Return a text, a bar and another text, in one line."""
    table = Table.grid(padding=(0, 2, 0, 0))
    width = min(BAR, columns - len(text) - len(more) - 4)
    if width < 4:
        return Text(f"{text}  {more}")
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_row(Text(text), ProgressBar(1.0, min(fraction, 1.0), width=width), Text(more))
    return table

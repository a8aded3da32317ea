"""The display of a run in progress, on stderr: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopipe.commands.settings import Events

from autopipe.errors import counted

from .event_lines import STANDARD_ERROR, writing
from .terminal import Subjects, Terminal, wrapped

LINE_EVERY_SECONDS = 1.0
# in a long run, print a line when this fraction of its duration has passed since the last: some hundreds per day
LINE_EVERY_PART = 0.02


@dataclass(slots=True)
class Lines:
    """Prints a line for each event; for steps, once a second and later less often, to keep logs short."""

    terminal: Terminal
    clock: Callable[[], float] = time.monotonic
    start: Mapping[str, Any] = field(default_factory=dict)
    printed: float = float("-inf")
    progress: Subjects = field(init=False)

    def __post_init__(self) -> None:
        self.progress = Subjects(self.terminal.say)

    def __call__(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Show an event."""
        if kind == "progress":
            self.progress(fields["what"], fields["fraction"])
        elif kind == "step":
            self._step(fields)
        elif kind in LASTING:
            self.terminal.say(LASTING[kind](fields))
        if kind == "start":
            self.start = fields

    def _step(self, fields: Mapping[str, Any]) -> None:
        now = self.clock()
        wait = max(LINE_EVERY_SECONDS, LINE_EVERY_PART * fields["seconds"])
        if now - self.printed < wait and fields["step"] + 1 != self.start.get("steps"):
            return
        self.printed = now
        self.terminal.say(step_line(fields, self.start))


def step_line(fields: Mapping[str, Any], start: Mapping[str, Any]) -> str:
    """Return the line of a step, counted from 1. ``start``: the run's first event, or {}."""
    from autopipe.report.text import time_to_go

    of = f"/{start['steps']}" if start.get("steps") else ""
    left = time_to_go(start, fields)
    more = f", {left}" if left else ""
    return (
        f"  step {fields['step'] + 1}{of}  loss {fields['loss']:.6f}  {fields['samples_per_second']:.1f} samples/s"
        f"  {fields['seconds']:.1f} s{more}"
    )


def stopping_line(fields: Mapping[str, Any]) -> str:
    """Return the line for a requested stop."""
    return f"{fields['signal']}: stopping after the current minibatch; press Ctrl-C to end at once"


def restart_line(fields: Mapping[str, Any]) -> str:
    """Return the lines for a restart: the failure, and the step the run resumes from."""
    start = f"from the checkpoint of step {fields['from_step']}" if fields["from_step"] else "from the beginning"
    return (
        f"rank {fields['rank']} failed at step {fields['reached'] + 1}: {fields['what']}\n"
        f"  restart {fields['number']} of {fields['of']}, {start}, on {fields['ranks']} ranks"
    )


def nonfinite_line(fields: Mapping[str, Any]) -> str:
    """Return the line for a step that is not finite."""
    after = "all ranks skipped the step" if fields["skipped"] else "training continues"
    return f"warning: step {fields['step'] + 1} is not finite ({fields['what']}); {after}"


def audit_line(fields: Mapping[str, Any]) -> str:
    """Return the line for the result of an audit."""
    if not fields["equal"]:
        return f"audit of step {fields['step'] + 1}: different from plain training"
    how = "bit for bit" if fields["bitwise"] else f"within {fields['max_relative_error']:.1e}"
    return f"audit of step {fields['step'] + 1}: equal to plain training, {how}"


def _indented(sentence: Callable[[Mapping[str, Any]], str], fields: Mapping[str, Any]) -> str:
    return f"  {sentence(fields)}"


SENTENCES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "stopping": stopping_line,
    "restart": restart_line,
    "nonfinite": nonfinite_line,
    "audit": audit_line,
}


# events that stay on the screen, and their lines
LASTING: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "note": lambda fields: f"  {fields['text']}",
    "start": lambda fields: f"training on {counted(fields['ranks'], 'rank')}, run directory {fields['run_dir']}",
    "checkpoint": lambda fields: f"  checkpoint of step {fields['step']}: {fields['path']}",
    "evaluation": lambda fields: f"  evaluation loss {fields['loss']:.6f} over {fields['samples']} samples",
    **{kind: functools.partial(_indented, sentence) for kind, sentence in SENTENCES.items()},
}


class Table:
    """The live display: progress, loss, samples/s, and the state of every rank, below the lines of events."""

    def __init__(self, terminal: Terminal) -> None:
        from rich.live import Live

        from autopipe.report.progress import RunDisplay

        self.console = terminal.console(stderr=True)
        self.run = RunDisplay()
        self.live = Live(console=self.console, refresh_per_second=4, transient=True, get_renderable=self._render)

    def __call__(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Show an event."""
        self.run.take(kind, fields)
        if kind in LASTING and kind != "checkpoint":  # the display shows its step, below the run directory
            self.console.print(wrapped(LASTING[kind](fields), sys.stderr), soft_wrap=True)

    def _render(self) -> Any:
        return self.run.renderable(self.console.width)


@contextlib.contextmanager
def shown(terminal: Terminal, lines: Callable[[Terminal], Events], table: Callable[[Terminal], Any]) -> Iterator[Any]:
    """Yield what shows events: a display, which has ``live``, on a terminal; lines elsewhere; nothing with ``-q``."""
    if terminal.verbosity < 0:
        yield lambda kind, fields: None
    elif not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":  # it cannot move the cursor
        yield lines(terminal)
    else:
        events = table(terminal)
        with events.live:
            yield events


@contextlib.contextmanager
def watching(terminal: Terminal, lines: Path | None = None) -> Iterator[Events]:
    """Yield the function that shows a run's events, and writes them to ``lines``.

    If they are written to standard error, only errors are shown there besides.
    """
    if lines == STANDARD_ERROR:
        terminal.verbosity = -1
        with writing(lines, lambda kind, fields: None) as written:
            yield written
        return
    events: Any = None
    try:
        with shown(terminal, Lines, Table) as events, writing(lines, events) as written:
            yield written
    except BaseException:
        if isinstance(events, Table) and events.run.step:  # the display is gone, and no summary follows
            terminal.say(step_line(events.run.step, events.run.start))
        raise

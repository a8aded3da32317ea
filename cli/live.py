"""The display of a run in progress, on stderr: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopipe.commands.settings import Events

from .terminal import Subjects, Terminal

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
        say = self.terminal.say
        if kind == "progress":
            self.progress(fields["what"], fields["fraction"])
        elif kind == "note":
            say(f"  {fields['text']}")
        elif kind == "start":
            self.start = fields
            say(f"training on {fields['ranks']} ranks, run directory {fields['run_dir']}")
        elif kind == "step":
            self._step(fields)
        elif kind == "checkpoint":
            say(f"  checkpoint of step {fields['step']}: {fields['path']}")
        elif kind == "evaluation":
            say(f"  evaluation loss {fields['loss']:.6f} over {fields['samples']} samples")
        elif kind in SENTENCES:
            say(f"  {SENTENCES[kind](fields)}")

    def _step(self, fields: Mapping[str, Any]) -> None:
        now = self.clock()
        wait = max(LINE_EVERY_SECONDS, LINE_EVERY_PART * fields["seconds"])
        if now - self.printed < wait and fields["step"] + 1 != self.start.get("steps"):
            return
        self.printed = now
        self.terminal.say(step_line(fields, self.start))


def step_line(fields: Mapping[str, Any], start: Mapping[str, Any]) -> str:
    """Return the line of a step, counted from 1. ``start``: the run's first event, or {}."""
    from autopipe.report.remaining import time_to_go

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


SENTENCES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "stopping": stopping_line,
    "restart": restart_line,
    "nonfinite": nonfinite_line,
    "audit": audit_line,
}


class Table:
    """The live table: step, loss, samples/s, and the activity of every rank."""

    def __init__(self, terminal: Terminal) -> None:
        from rich.live import Live

        console = terminal.console(stderr=True)
        self.terminal = terminal
        self.start: Mapping[str, Any] = {}
        self.step: Mapping[str, Any] = {}
        self.states: tuple[str, ...] = ()
        self.activity = ""
        self.live = Live(console=console, refresh_per_second=8, transient=True, get_renderable=self._render)

    def __call__(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Show an event."""
        if kind == "progress":
            self.activity = f"{fields['what']} {fields['fraction']:.0%}"
        elif kind == "note":
            self.live.console.print(f"  {fields['text']}")
        elif kind == "start":
            self.start, self.activity = fields, ""
            self.live.console.print(f"training on {fields['ranks']} ranks, run directory {fields['run_dir']}")
        elif kind == "step":
            self.step = fields
        elif kind == "ranks":
            self.states = tuple(fields["states"])
        elif kind == "checkpoint":
            self.live.console.print(f"  checkpoint of step {fields['step']}: {fields['path']}")
        elif kind in SENTENCES:
            self.live.console.print(f"  {SENTENCES[kind](fields)}")

    def _render(self) -> Any:
        from autopipe.report.tables import live

        return live(self.start, self.step, self.states, self.activity)


@contextlib.contextmanager
def shown(terminal: Terminal, lines: Callable[[Terminal], Events], table: Callable[[Terminal], Any]) -> Iterator[Any]:
    """Yield what shows events: a table, which has ``live``, on a terminal; lines elsewhere; nothing with ``-q``."""
    if terminal.verbosity < 0:
        yield lambda kind, fields: None
    elif not sys.stderr.isatty():
        yield lines(terminal)
    else:
        events = table(terminal)
        with events.live:
            yield events


@contextlib.contextmanager
def watching(terminal: Terminal) -> Iterator[Events]:
    """Yield the function that shows a run's events."""
    with shown(terminal, Lines, Table) as table:
        yield table
    if isinstance(table, Table) and table.step:
        terminal.say(step_line(table.step, table.start))

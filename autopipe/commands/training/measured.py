"""What a run measured of itself: its speed beside the prediction, its timeline, and the wait for its first step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopipe.commands.settings import Events
from autopipe.commands.training.attempts import Attempts
from autopipe.commands.training.listener import Listener
from autopipe.cores import usable_cores
from autopipe.ir import artifact
from autopipe.ir.timeline import Timeline
from autopipe.report.slower import Speed, speed_of
from autopipe.runtime.job import RunDirectory
from autopipe.units import in_seconds

_LONG_SECONDS = 10.0
"""A shorter wait for the ranks is not explained."""
_LEAST_PART = 0.02
"""A phase that took a smaller part of the wait is not listed."""
_PHASES = {"microbatch": "measuring", "optimizer": "measuring", "done": "planning"}
"""First word of a progress text -> its phase, where that is not the word itself."""


class Preparation:
    """Passes events on, and times the phases of the work before the ranks start by the texts of their progress."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._begin = self._last = time.monotonic()
        self._phase = ""
        self._seconds: dict[str, float] = {}

    def __call__(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Pass an event on."""
        if kind == "progress":
            word = fields["what"].partition(" ")[0]
            self._enter(_PHASES.get(word, word))
        self._events(kind, fields)

    def _enter(self, phase: str) -> None:
        now = time.monotonic()
        if self._phase:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._last
        self._phase, self._last = phase, now

    def explain(self) -> None:
        """Note how long each phase took, if all of them took long."""
        self._enter("")
        total = self._last - self._begin
        if total < _LONG_SECONDS:
            return
        phases = [f"{name} {in_seconds(spent)}" for name, spent in self._seconds.items() if spent > _LEAST_PART * total]
        if phases and phases[-1].startswith("comparing"):
            phases[-1] += " (--no-check saves it)"
        if phases:
            self._events("note", {"text": f"ready after {in_seconds(total)}: {', '.join(phases)}"})


def write_speed(run: RunDirectory, listener: Listener, attempts: Attempts, seconds: float) -> Speed:
    """Return the speed of a run beside the prediction, and write it to the run."""
    settings, prepared = attempts.settings, attempts.prepared
    spent = list(listener.spent.values())
    here = settings.launch.name == "local" and prepared.profile.device.kind == "cpu"
    speed = speed_of(
        prepared.plan,
        listener.samples / seconds if seconds else 0.0,
        spent,
        steps=listener.counted,
        threads=prepared.profile.device.threads if here else 0,
        cores=usable_cores(),
        others=listener.load.of_others(sum(row["cpu"] for row in spent)),
        compared=listener.first_steps is not None and listener.first_steps.beside,
    )
    artifact.save(speed, run.speed)
    return speed


def write_timeline(run: RunDirectory, listener: Listener, world: int) -> None:
    """Write when each rank ran each instruction, if that was measured."""
    if listener.spans:
        first = min(span.start_seconds for span in listener.spans)
        spans = tuple(
            replace(s, start_seconds=s.start_seconds - first, end_seconds=s.end_seconds - first) for s in listener.spans
        )
        artifact.save(Timeline("measured", world, spans), run.timeline)

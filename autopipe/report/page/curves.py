"""Rows of metrics.jsonl -> the loss, the throughput and the evaluations of all attempts of a run, as columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopipe.report.results import StagePeak
from autopipe.units import finite

MOST_POINTS = 4000
_SAME_COMMAND_SECONDS = 2.0  # by which the clocks of rows of one command may differ


@dataclass(slots=True)
class Attempt:
    """The steps between two starts of the ranks."""

    reason: str  # why it began
    steps: list[int] = field(default_factory=list)  # counted from 1
    losses: list[float | None] = field(default_factory=list)  # None: not finite
    rates: list[float | None] = field(default_factory=list)  # samples per second of each step; None: not known


@dataclass(slots=True)
class History:
    """What the metrics of a run contain."""

    attempts: list[Attempt] = field(default_factory=list)
    evaluations: list[tuple[int, float | None]] = field(default_factory=list)  # step, loss
    audits: list[tuple[int, bool]] = field(default_factory=list)  # step, whether it was equal
    peaks: list[StagePeak] = field(default_factory=list)  # of the last attempt that measured memory
    unreadable: int = 0  # rows that are not complete
    started: float | None = None  # when the command of the last row began, in seconds since 1970

    @property
    def losses(self) -> dict[int, float | None]:
        """The loss of each step; of a repeated step, the last one."""
        return {
            step: loss for attempt in self.attempts for step, loss in zip(attempt.steps, attempt.losses, strict=True)
        }

    @property
    def samples_per_second(self) -> float | None:
        """The median over the steps of the last attempt, without its first; None if no step was timed."""
        rates = sorted(rate for rate in (self.attempts[-1].rates if self.attempts else ())[1:] if rate is not None)
        return rates[len(rates) // 2] if rates else None


def history_of(rows: Iterable[Mapping[str, Any]]) -> History:
    """Read the rows of metrics.jsonl. A row that lacks a value, or has one of a wrong type, is counted and skipped."""
    history = History()
    clock, reason = math.inf, ""
    for row in rows:
        try:
            if "restart" in row:
                reason = f"restart {int(row['restart'])} from step {int(row['from_step'])}, {int(row['ranks'])} ranks"
            elif "evaluation_loss" in row:
                history.evaluations.append((int(row["step"]), _number(row["evaluation_loss"])))
            elif "audit" in row:
                history.audits.append((int(row["audit"]) + 1, bool(row["equal"])))
            elif "peak" in row:
                history.peaks.append(StagePeak(**{key: int(value) for key, value in row["peak"].items()}))
            else:
                clock, reason = _add_step(history, row, clock, reason)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            history.unreadable += 1
    latest = {(peak.stage, peak.rank): peak for peak in history.peaks}
    history.peaks = [latest[key] for key in sorted(latest)]
    return history


def _add_step(history: History, row: Mapping[str, Any], clock: float, reason: str) -> tuple[float, str]:
    step, loss = int(row["step"]) + 1, _number(row["loss"])
    seconds, samples = float(row["seconds"]), int(row["samples"])
    if not math.isfinite(seconds):
        raise ValueError(f"seconds are {seconds}")
    time = _number(row.get("time"))
    started = None if time is None else time - seconds
    before, history.started = history.started, started
    is_other = started is not None and before is not None and abs(started - before) > _SAME_COMMAND_SECONDS
    begins = reason or seconds <= clock or is_other
    if begins:
        text = reason or (f"resumed from step {step - 1}" if history.attempts else "")
        history.attempts.append(Attempt(text))
        rate = None
        if not reason:  # the clock of a run goes on after a restart
            rate = samples / seconds if seconds > 0 else None
    else:
        rate = samples / (seconds - clock)
    attempt = history.attempts[-1]
    attempt.steps.append(step)
    attempt.losses.append(loss)
    attempt.rates.append(rate)
    return seconds, ""


def _number(value: Any) -> float | None:
    return None if value is None else finite(float(value))


def columns(history: History) -> dict[str, Any]:
    """Return the attempts as columns. Of a long run, each point is the mean of ``perPoint`` steps."""
    total = sum(len(attempt.steps) for attempt in history.attempts)
    width = max(1, math.ceil(total / MOST_POINTS))
    return {
        "perPoint": width,
        "attempts": [_thinned(attempt, width) for attempt in history.attempts],
        "evaluations": [[step for step, _ in history.evaluations], [loss for _, loss in history.evaluations]],
    }


def _thinned(attempt: Attempt, width: int) -> dict[str, Any]:
    places = range(0, len(attempt.steps), width)
    return {
        "reason": attempt.reason,
        "steps": [attempt.steps[min(place + width, len(attempt.steps)) - 1] for place in places],
        "losses": [_mean(attempt.losses[place : place + width]) for place in places],
        "rates": [_mean(attempt.rates[place : place + width]) for place in places],
    }


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return float(f"{math.fsum(known) / len(known):.9g}") if known else None

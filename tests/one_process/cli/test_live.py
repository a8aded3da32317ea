"""Progress lines of a run: the time that remains, and fewer lines the longer it runs."""

from __future__ import annotations

from typing import Any

import pytest

from autopipe.cli.live import Lines, step_line
from autopipe.cli.terminal import Terminal
from autopipe.report.remaining import seconds_left, time_to_go
from autopipe.report.text import in_minutes


class Screen(Terminal):
    """Keeps the printed lines."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def step(number: int, seconds: float) -> dict[str, Any]:
    return {"step": number, "loss": 1.0, "samples_per_second": 8.0, "seconds": seconds}


def start(steps: int, start_step: int = 0) -> dict[str, Any]:
    return {"ranks": 2, "steps": steps, "start_step": start_step, "batch_size": 8, "run_dir": "here"}


def test_the_remaining_time_is_shown_once_steps_are_measured() -> None:
    assert seconds_left(start(440), step(0, 60.0)) is None  # the first step includes one-time costs
    assert seconds_left(start(440), step(9, 2.0)) is None
    assert seconds_left(start(440), step(9, 10.0)) == pytest.approx(430)
    assert seconds_left(start(440, 400), step(409, 10.0)) == pytest.approx(30)
    assert seconds_left(start(0), step(9, 10.0)) is None  # the length of the data is unknown
    assert seconds_left({}, step(9, 10.0)) is None


@pytest.mark.parametrize(("seconds", "text"), [(45, "45 s"), (430, "7 min"), (12240, "3.4 h")])
def test_remaining_times_are_short_texts(seconds: float, text: str) -> None:
    assert in_minutes(seconds) == text


def test_lines_show_the_remaining_time_and_become_rare() -> None:
    screen, now = Screen(), [0.0]
    lines = Lines(screen, clock=lambda: now[0])
    lines("start", start(86400))
    for number in range(86400):  # a day of one-second steps
        now[0] += 1.0
        lines("step", step(number, now[0]))
    lines_of_steps = [line for line in screen.said if line.startswith("  step")]
    assert 100 < len(lines_of_steps) < 1000
    assert lines_of_steps[0].startswith("  step 1/86400")
    assert "h left" in lines_of_steps[10]
    assert lines_of_steps[-1].startswith("  step 86400/86400")


def test_data_of_unknown_length_shows_its_rate() -> None:
    assert time_to_go(start(0), step(9, 2.0)) == ""  # unknown yet
    assert time_to_go(start(0), step(49, 20.0)) == "unknown length: 2.5 steps/s"
    assert time_to_go(start(0, 40), step(49, 20.0)) == "unknown length: 0.5 steps/s"
    assert time_to_go({}, step(49, 20.0)) == ""
    assert time_to_go(start(100), step(99, 20.0)) == ""  # no time remains
    assert time_to_go(start(100), step(49, 600.0)) == "10 min left"
    assert step_line(step(49, 20.0), start(0)).endswith("20.0 s, unknown length: 2.5 steps/s")

"""Progress lines of a run: the time that remains, and fewer lines the longer it runs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autopipe.cli import terminal as terminal_module
from autopipe.cli.live import Lines, step_line, watching
from autopipe.cli.terminal import Terminal
from autopipe.errors import RunError
from autopipe.report.progress import MOST_COLUMNS, RunDisplay
from autopipe.report.text import in_minutes, seconds_left, time_to_go


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


def screen(display: RunDisplay, width: int = 80, *, colour: bool = False) -> str:
    """Return what a terminal of so many columns shows."""
    system: Any = "standard" if colour else None
    console = Console(file=io.StringIO(), width=width, force_terminal=colour, color_system=system)
    with console.capture() as capture:
        console.print(display.renderable(width))
    return capture.get()


def playing(ranks: int = 2) -> RunDisplay:
    display = RunDisplay()
    names = ["blocks.0 to blocks.2", "blocks.3 to blocks.5, norm, head, and a name that does not fit in the line"]
    fields = {"modules": names, "stage_ranks": [[0], [1]], "unit_mfu": 0.002}
    display.take("start", start(40) | fields | {"ranks": ranks})
    display.take("step", step(19, 30.0))
    display.take("ranks", {"states": ["0F3", "waits in 1RF3<0", *["saving"] * (ranks - 2)]})
    return display


SCREEN = """\
step 20/40  ━━━━━━━━━━━━━━                50%  30 s left
loss 1.000000  8.0 samples/s  MFU 1.6%  checkpoint: step 16
rank 0  training   0F3       blocks.0 to blocks.2
rank 1  waiting    1RF3<0    blocks.3 to blocks.5, norm, head, and a name that
"""


def test_the_display_of_a_run_fits_80_columns() -> None:
    display = playing()
    display.take("checkpoint", {"step": 16, "path": "c"})
    lines = [line.rstrip() for line in screen(display).splitlines()]
    assert "\n".join(lines) + "\n" == SCREEN


@pytest.mark.parametrize("width", [1, 20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for display in (playing(), playing(32), RunDisplay(activity="a long description of what is done " * 4)):
        lines = screen(display, width).splitlines()
        assert max(map(len, lines), default=0) <= min(width, MOST_COLUMNS)
        assert len(lines) <= 4


def test_colour_is_only_in_colours() -> None:
    assert "\x1b[" in screen(playing(), colour=True)
    assert "\x1b[" not in screen(playing())


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([("ranks", {"states": ["starting", "waits in connecting"]})], ["starting", "starting"]),
        ([("ranks", {"states": ["0F1", "waits in saving"]})], ["training", "saving"]),
        ([("evaluating", {"step": 1}), ("ranks", {"states": ["0F1", "waits in 1RF1<0"]})], ["evaluating"] * 2),
        ([("evaluating", {"step": 1}), ("evaluation", {}), ("ranks", {"states": ["0F1", "loss"]})], ["training"] * 2),
        ([("restart", {"rank": 1}), ("ranks", {"states": ["0F1", "starting"]})], ["training", "failed"]),
        ([("stopping", {}), ("step", step(1, 1.0)), ("ranks", {"states": ["0F1", "stopping"]})], ["stopping"] * 2),
    ],
)
def test_the_state_of_a_rank_is_one_word(events: list[tuple[str, dict[str, Any]]], words: list[str]) -> None:
    display = RunDisplay(start=start(10))
    for kind, fields in events:
        display.take(kind, fields)
    lines = [line for line in screen(display).splitlines() if line.startswith("rank")]
    assert [line.split()[2] for line in lines] == words


def play(events: Any) -> None:
    events("start", start(2))
    events("ranks", {"states": ["0F1"]})
    events("step", step(0, 1.0) | {"loss": float("nan")})


def test_events_are_lines_of_json_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    with watching(Terminal(), path) as events:
        play(events)
    with pytest.raises(RunError), watching(Terminal(), path) as events:
        raise RunError("the disk is full")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", "step", "end", "end"]
    assert {line["schema_version"] for line in lines} == {terminal_module.SCHEMA_VERSION}
    assert (lines[1]["loss"], lines[2]["error"], lines[3]["error"]) == (None, "", "the disk is full")
    assert "step 1/2" in capsys.readouterr().err


def test_events_replace_the_progress_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    with watching(terminal, Path("-")) as events:
        play(events)
    terminal.next("autopipe export")
    output = capsys.readouterr()
    assert [json.loads(line)["event"] for line in output.err.splitlines()] == ["start", "step", "end"]
    assert output.out == ""


def test_events_that_cannot_be_written_end_the_command_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the events cannot be written: Is a directory"), watching(Terminal(), tmp_path):
        pass

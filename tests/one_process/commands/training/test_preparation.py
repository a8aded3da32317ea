"""A long wait for the first step is explained: each phase with its seconds, and what would save it."""

import pytest

from autopipe.commands.training import measured


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(measured.time, "monotonic", lambda: now[0])
    return now


def notes_of(clock, *phases):
    notes = []
    preparation = measured.Preparation(lambda kind, fields: notes.append(fields["text"]) if kind == "note" else None)
    for what, seconds in phases:
        preparation("progress", {"what": what, "fraction": 0.0})
        clock[0] += seconds
    preparation.explain()
    return notes


def test_each_phase_has_its_seconds(clock):
    phases = [
        ("importing the model: gpt.py", 0.01),
        ("capturing the model: gpt.py", 4.0),
        ("microbatch of 1: node a", 5.0),
        ("optimizer step", 2.0),
        ("comparing 2 steps with plain training", 9.0),
    ]
    assert notes_of(clock, *phases) == [
        "ready after 20.0 s: capturing 4.00 s, measuring 7.00 s, comparing 9.00 s (--no-check saves it)"
    ]


def test_a_stored_profile_and_no_comparison(clock):
    assert notes_of(clock, ("importing the model: gpt.py", 8.0), ("capturing the model: gpt.py", 4.0)) == [
        "ready after 12.0 s: importing 8.00 s, capturing 4.00 s"
    ]


def test_a_short_wait_is_not_explained(clock):
    assert notes_of(clock, ("capturing the model: gpt.py", 4.0)) == []

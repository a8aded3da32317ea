"""Heartbeats: the last note of a rank can be read by another process at any time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from autopipe.launch.rank.heartbeat import Heartbeats


def test_the_last_note_of_each_rank_is_read_by_another_mapping(tmp_path: Path) -> None:
    supervisor = Heartbeats(tmp_path / "beats", 2, create=True)
    assert supervisor.read(0).count == 0 and supervisor.read(0).doing == ""
    rank = Heartbeats(tmp_path / "beats", 2)
    rank.note(1, "1F0@0", False)
    rank.note(1, "1RF1<0", True)
    note = supervisor.read(1)
    assert (note.count, note.doing, note.waiting) == (2, "1RF1<0", True)
    assert note.seconds > 0
    assert supervisor.read(0).count == 0


def test_a_long_or_odd_text_does_not_spill_into_the_next_rank(tmp_path: Path) -> None:
    beats = Heartbeats(tmp_path / "beats", 2, create=True)
    beats.note(0, "é" * 500, False)
    assert beats.read(0).doing == "?" * 64
    assert beats.read(1).doing == ""


def test_a_note_is_never_read_or_left_empty(tmp_path: Path) -> None:
    """A rank may be read, and killed, in the middle of a note."""
    beats = Heartbeats(tmp_path / "beats", 1, create=True)
    beats.note(0, "1F0@0", False)
    rank = os.fork()
    if rank == 0:
        while True:
            beats.note(0, "1F0@0", False)
    try:
        end = time.monotonic() + 0.3
        texts = set()
        while time.monotonic() < end:
            texts.add(beats.read(0).doing)
    finally:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
    assert texts == {"1F0@0"}

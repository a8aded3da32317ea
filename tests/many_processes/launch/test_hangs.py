"""A rank hangs: the watchdog reports the rank and its stack, and ends the run."""

from __future__ import annotations

import signal
from pathlib import Path

from support.commands import Commands, assert_gone, descendants, stage_label, training, wait_for_steps
from support.waiting import under_load

# the fourth minibatch never arrives at the rank that reads
STUCK = """
import multiprocessing
import select

plenty = data
def data(batch_size=8):
    for step, item in enumerate(plenty(batch_size)):
        if step == 3 and multiprocessing.current_process().name == "rank 0":
            select.select([], [], [])  # without end
        yield item
"""


def test_a_suspended_rank_is_named(commands: Commands, tmp_path: Path) -> None:
    process = commands.start(*training(2, steps=1_000_000), "--watchdog", f"{under_load(5):.0f}")
    ranks = wait_for_steps(tmp_path / "run", process)
    family = descendants(process.pid)
    ranks[1].send_signal(signal.SIGSTOP)
    _, err = process.communicate(timeout=60)
    text = " ".join(err.split())
    assert process.returncode == 3
    assert "no rank has moved for" in text and "(stopped by a signal)" in text
    assert "at: rank 1, stage 1" in text
    assert "--watchdog" in text
    assert_gone(family)


def test_a_rank_that_hangs_in_the_users_code_is_named_with_its_line(commands: Commands, tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(model.read_text() + STUCK)
    line = next(n for n, text in enumerate(model.read_text().splitlines(), 1) if "without end" in text)
    process = commands.start(*training(2, steps=20), "--watchdog", f"{under_load(5):.0f}")
    _, err = process.communicate(timeout=120)
    message = " ".join(err.split())
    assert process.returncode == 3
    assert f"model.py:{line} in data" in message
    assert f"at: rank 0, {stage_label(tmp_path / 'run', 0)}, instruction reading data" in message
    assert "rank 1:" in message  # the stack of the other rank
    assert "Traceback" not in err

"""``train`` compares its first steps beside the ranks if that takes long: the run begins, and a difference ends it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest
from support.commands import Commands, assert_gone, descendants, training
from support.waiting import under_load, wait_until

# every comparison takes long
LONG = """

import autopipe.commands.checking.first_steps as first_steps
first_steps.LONG_SECONDS = 0.0
"""
# plain training computes something else than what was captured
OTHER = """

import multiprocessing

class Net(Net):
    def forward(self, x, index):
        factor = 1.5 if multiprocessing.current_process().name == "compare_beside" else 1.0
        return self.last(factor * (self.first(x) + self.table(index)))
"""
# the comparison reads its data when the test allows it
LATE = """

import multiprocessing, pathlib, select
plain_data = data
def data(batch_size=8):
    if multiprocessing.current_process().name == "compare_beside":
        while not pathlib.Path("compare").exists():
            select.select([], [], [], 0.05)
    return plain_data(batch_size)
"""
# the data of the comparison fails
BUSY = """

import multiprocessing
free_data = data
def data(batch_size=8):
    if multiprocessing.current_process().name == "compare_beside":
        raise ValueError("another process reads it")
    return free_data(batch_size)
"""
# a model with blocks, and memory for a comparison with some of them
BLOCKS = """

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.table, self.last = nn.Linear(8, WIDTH), nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(24)))

    def forward(self, x, index):
        return self.last(self.blocks(self.first(x) + self.table(index)))

import autopipe.commands.checking.fitting as fitting
fitting.available_bytes = lambda: 3_000_000
"""
# a hook of the supervisor imports another file, and ends the run
HOOK = """

def on_step(step, metrics):
    from other import LAST
    return "stop" if step == LAST else None
"""
FAILING = """

import multiprocessing
whole_data = data
def data(batch_size=8):
    for step, item in enumerate(whole_data(batch_size)):
        if step == 4 and multiprocessing.current_process().name.startswith("rank"):
            raise ValueError("no more data")
        yield item
"""
BESIDE = "comparing 3 steps with plain training while the ranks train"


def append(commands: Commands, *parts: str) -> None:
    model = commands.folder / "model.py"
    model.write_text(model.read_text() + "".join((LONG, *parts)))


def checkpoints(commands: Commands) -> set[str]:
    return {path.name for path in (commands.folder / "run" / "checkpoints").glob("step-*")}


def test_equal_steps_are_told_and_not_compared_again(commands: Commands) -> None:
    append(commands, LATE)
    (commands.folder / "compare").touch()
    _, err = commands.run(*training(steps=5))
    assert not list(commands.temporary.glob("autopipe-check-*"))
    assert BESIDE in err and err.index(BESIDE) < err.index("step 1/5") < err.index("3 steps compared with plain")
    assert "equal, bit for bit" in err and "proven equal to plain training: 3 of 5 steps compared, 1 audited" in err
    _, err = commands.run(*training(steps=5, run="again"))
    assert BESIDE not in err and "the first 3 steps were compared before" in err
    assert "proven equal to plain training: 3 of 5 steps compared, 1 audited" in err


def test_some_blocks_are_compared_beside_the_ranks_where_the_complete_model_does_not_fit(commands: Commands) -> None:
    append(commands, BLOCKS, LATE)
    (commands.folder / "compare").touch()
    _, err = commands.run(*training(steps=5))
    assert BESIDE in err and err.index("step 1/5") < err.index(" of 24 blocks of the model, and without")
    assert "3 steps compared with plain training: equal, bit for bit" in err
    assert re.search(r"3 of 5 steps compared with \d+ of 24 blocks of the model, 1 audited", err)


def test_a_difference_ends_the_run_and_sets_its_checkpoints_aside(commands: Commands) -> None:
    append(commands, OTHER, LATE)
    words = ["--audit-every", "0", "--checkpoint-every", "2"]
    command = commands.start(*training(steps=1_000_000), *words)
    wait_until(lambda: checkpoints(commands), under_load(60))
    (commands.folder / "compare").touch()
    _, err = command.communicate(timeout=under_load(60))
    assert command.returncode == 1 and BESIDE in err and "training in stages differs from plain training" in err
    assert "moved later checkpoints" in err and all(name.endswith(".abandoned") for name in checkpoints(commands))
    _, err = commands.run(*training(steps=5, run="again"), code=1)  # nothing says that it was equal
    assert "training in stages differs from plain training" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_does_not_wait_for_the_comparison(commands: Commands, number: signal.Signals) -> None:
    append(commands, LATE)
    command = commands.start(*training(steps=1_000_000))
    wait_until(lambda: "loss" in metrics(commands.folder), under_load(60))
    processes = descendants(command.pid)
    command.send_signal(number)
    _, err = command.communicate(timeout=under_load(60))
    assert command.returncode == 75 and "with a checkpoint" in err and len(checkpoints(commands)) == 1
    assert "not checked: the comparison with plain training did not end; the next run repeats it" in err
    assert "no step of the run is proven" in err
    assert_gone(processes)
    assert not list(commands.temporary.glob("autopipe-check-*"))


def test_a_difference_after_a_resume_sets_all_checkpoints_aside(commands: Commands) -> None:
    append(commands, OTHER, LATE)
    words = ["--audit-every", "0", "--checkpoint-every", "2"]
    command = commands.start(*training(steps=1_000_000), *words)
    wait_until(lambda: checkpoints(commands), under_load(60))
    command.send_signal(signal.SIGINT)
    command.communicate(timeout=under_load(60))
    assert command.returncode == 75 and checkpoints(commands)
    (commands.folder / "compare").touch()
    _, err = commands.run(*training(steps=1_000_000), "--resume", *words, code=1)
    assert "training in stages differs from plain training" in err
    assert all(name.endswith(".abandoned") for name in checkpoints(commands))


def test_a_run_that_its_hook_ends_waits_for_the_difference(commands: Commands) -> None:
    append(commands, OTHER, HOOK)
    (commands.folder / "other.py").write_text("LAST = 3")
    _, err = commands.run(*training(steps=1_000_000), "--audit-every", "0", code=1)
    assert "training in stages differs from plain training" in err


def test_a_comparison_that_fails_does_not_end_the_run(commands: Commands) -> None:
    append(commands, BUSY)
    _, err = commands.run(*training(steps=9), "--audit-every", "0")
    assert "not checked: " in err and "another process reads it" in err
    assert len(checkpoints(commands)) == 1 and "no step of the run is proven" in err


def test_an_equal_comparison_that_cannot_be_recorded_is_told(commands: Commands) -> None:
    append(commands, LATE)
    command = commands.start(*training(steps=200), "--audit-every", "0")
    wait_until(lambda: "loss" in metrics(commands.folder), under_load(60))
    (commands.folder / ".autopipe" / "checked").mkdir()
    (commands.folder / "compare").touch()
    _, err = command.communicate(timeout=under_load(60))
    assert command.returncode == 0 and "3 steps compared with plain training: equal" in err
    assert "the next run compares again: .autopipe/checked cannot be written (Is a directory)" in err


def metrics(folder: Path) -> str:
    path = folder / "run" / "metrics.jsonl"
    return path.read_text() if path.is_file() else ""


def test_a_comparison_that_is_killed_does_not_end_the_run(commands: Commands) -> None:
    append(commands, LATE)
    command = commands.start(*training(steps=200))
    wait_until(lambda: "loss" in metrics(commands.folder), under_load(60))
    usual, beside = psutil.Process(command.pid).nice(), list[psutil.Process]()

    def compares() -> bool:
        beside.extend(process for process in descendants(command.pid) if process.nice() > usual)
        return bool(beside)

    wait_until(compares, under_load(60))
    assert len(beside) == 1
    beside[0].kill()
    _, err = command.communicate(timeout=under_load(60))
    assert command.returncode == 0 and "not checked: comparing with plain training: the process was killed" in err
    assert "none of 200 steps compared, 1 audited" in err


def test_an_edited_file_proves_nothing(commands: Commands) -> None:
    append(commands, OTHER, LATE)
    command = commands.start(*training(steps=100), "--audit-every", "0")
    wait_until(lambda: "loss" in metrics(commands.folder), under_load(60))
    model = commands.folder / "model.py"
    model.write_text(model.read_text() + "\n# edited\n")
    (commands.folder / "compare").touch()
    _, err = command.communicate(timeout=under_load(60))
    assert command.returncode == 0 and "model.py was edited since the run began" in err


@pytest.mark.parametrize("kept", [False, True])
def test_a_run_that_fails_waits_for_a_comparison_that_may_know_why(commands: Commands, kept: bool) -> None:
    append(commands, *([OTHER] if kept else []), FAILING)
    _, err = commands.run(*training(steps=9), "--audit-every", "0", code=1 if kept else 3)
    assert ("no more data" in err) is not kept
    assert ("training in stages differs from plain training" in err) is kept

"""Single faults, at random, on this machine: each is named, ends all of it, and the run goes on to equal weights."""

from __future__ import annotations

import time
from pathlib import Path

import faults
import psutil
import pytest
from commands import assert_gone, descendants
from faults import AUTOPIPE, COUNT, STEPS, TO_RANKS, Fault, moment, steps_done

pytestmark = pytest.mark.slow


def at_random(number: int) -> Fault:
    return Fault.at_random(number, ("fork server", "supervisor"), ranks=3)


def ranks_of(process_id: int) -> dict[int, psutil.Process]:
    """Return the ranks below a process, known by their logs."""
    found = {}
    for child in descendants(process_id):
        try:
            logs = [file.path for file in child.open_files() if "/logs/rank_" in file.path]
        except psutil.Error:
            continue
        if logs:
            found[int(Path(logs[0]).stem.removeprefix("rank_"))] = child
    return found


def strike(fault: Fault, process_id: int) -> str:
    """Do it, and return what is to be said."""
    if fault.kind in TO_RANKS:
        ranks_of(process_id)[fault.whom].send_signal(TO_RANKS[fault.kind])
        return f"at: rank {fault.whom}, "
    if fault.kind == "supervisor":
        psutil.Process(process_id).kill()
        return ""
    children = psutil.Process(process_id).children()
    next(child for child in children if "forkserver" in " ".join(child.cmdline())).kill()
    return "at: rank "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.prepared(tmp_path_factory.mktemp("work"), ranks=3)


@pytest.mark.parametrize("number", range(COUNT), ids=lambda number: str(at_random(number)))
def test_a_fault_is_named_and_the_run_goes_on_to_equal_weights(folder: Path, number: int) -> None:
    fault, run_dir = at_random(number), f"run-{number}"
    process = faults.start([AUTOPIPE, *faults.training(run_dir)], folder)
    try:
        metrics = folder / run_dir / "metrics.jsonl"
        while process.poll() is None and (steps_done(metrics) < fault.after or len(ranks_of(process.pid)) < 3):
            moment()
        assert process.poll() is None, process.communicate()
        family = descendants(process.pid)
        named, begin = strike(fault, process.pid), time.monotonic()
        _, err = process.communicate(timeout=faults.MOST_SECONDS + 30)
        if process.returncode == 0:
            assert steps_done(metrics) == STEPS  # it came too late
        elif fault.kind != "supervisor":  # that one says nothing any more
            faults.assert_clear(fault, err, process.returncode, named=named, took=time.monotonic() - begin)
        assert_gone(family)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    faults.assert_goes_on_to_equal_weights(folder, run_dir)

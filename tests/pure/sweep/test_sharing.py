"""How many jobs share a device: as given, as before, or as the simulation says."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.errors import RunError
from autopipe.sweep.file import AUTO, SweepFile, SweepJob, parse_jobs_per_device
from autopipe.sweep.job_table import Board
from autopipe.sweep.sharing import Sharing, places_wanted
from autopipe.sweep.state import Folder, JobRecord

SECONDS = 1.0  # of a step


def board_of(folder: Path, loads: list[tuple[float, float]]) -> Board:
    """Return a board with a structure for each job. ``loads``: the share of computation and of copies in a step."""
    jobs = tuple(SweepJob(n, f"job-{n}", "", f"{n}.py", {"steps": 100}, {}) for n in range(1, len(loads) + 1))
    sweep = SweepFile(Path("sweep.toml"), jobs, None, 60.0, "loss", None)
    board = Board.of(sweep, Folder(folder), [JobRecord(job.name, job.digest) for job in jobs])
    for structure, (computes, copies) in zip(board.structures, loads, strict=True):
        figures = {"step_seconds": SECONDS, "epoch_steps": 0, "spilled": copies > 0, "part_bytes": None}
        structure.learn({**figures, "compute_seconds": computes, "copy_seconds": copies, "visits": 16 * (copies > 0)})
    return board


@pytest.mark.parametrize(
    ("loads", "places"),
    [
        ([(1.0, 0.2), (0.2, 1.0)], 2),  # the copies of one hide behind the computation of the other
        ([(1.0, 0.9), (1.0, 0.9)], 1),  # both compute all the time
        ([(1.0, 0.0), (1.0, 0.0)], 1),  # their models stay on the device
    ],
)
def test_auto_shares_a_device_where_the_simulation_says_that_it_pays(
    tmp_path: Path, loads: list[tuple[float, float]], places: int
) -> None:
    board = board_of(tmp_path, loads)
    sharing = Sharing(board, [0], 60.0, AUTO)
    assert [sharing.may_begin(entry) for entry in board.entries] == [not copies for _, copies in loads]
    board.structures[0].prepared = False
    assert sharing.decide() == "" and sharing.chosen == 0
    board.structures[0].prepared = True
    note = sharing.decide()
    assert (sharing.places, sharing.chosen, bool(note)) == (places, places, places > 1)
    assert all(sharing.may_begin(entry) for entry in board.entries)
    # they are prepared again, with a part of the memory
    assert [structure.prepared for structure in board.structures] == [places == 1] * 2
    assert {structure.parts for structure in board.structures} == {places}


def test_a_job_that_does_not_fit_its_part_has_the_device_for_itself(tmp_path: Path) -> None:
    board = board_of(tmp_path, [(1.0, 0.5), (1.0, 0.5)])
    sharing = Sharing(board, [0], 60.0, 3)
    board.structures[0].part_bytes = 1000
    first, second = board.entries
    assert (sharing.each(first), sharing.each(second)) == (1, 3)
    assert sharing.address(second, (0,)) == ""
    address = sharing.address(first, (0,))
    try:
        assert address.startswith("0:1:")
    finally:
        sharing.close()
    assert not Path(address.split(":", 2)[2]).exists()


def test_a_resumed_sweep_keeps_the_number() -> None:
    assert [places_wanted(0, wanted) for wanted in (None, AUTO, 1, 3)] == [1, AUTO, 1, 3]
    assert [places_wanted(2, wanted) for wanted in (None, AUTO, 2)] == [2, 2, 2]
    with pytest.raises(RunError, match="2 jobs a device were chosen when the sweep began, and now 3"):
        places_wanted(2, 3)


def test_the_number_is_auto_or_from_1_to_64() -> None:
    assert [parse_jobs_per_device(value) for value in ("auto", 1, "3", 64)] == [AUTO, 1, 3, 64]
    for wrong in (0, -1, 65, "two", 1.5, True, None, [2]):
        with pytest.raises(ValueError, match="neither auto nor a number of jobs"):
            parse_jobs_per_device(wrong)

"""``sweep``: many trainings on a few devices, from Python and for the command line."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopipe.commands.locks import only_one
from autopipe.commands.settings import WORK_DIRECTORY, Events, StopEvent, ignore_event
from autopipe.errors import RunError
from autopipe.report.results import SweepResult, SweepRow, Timetable
from autopipe.sweep import state
from autopipe.sweep.file import SweepFile, parse_devices, parse_jobs_per_device, read_sweep
from autopipe.workers.signals import StopRequest
from autopipe.workers.unguarded import refuse_unguarded

if TYPE_CHECKING:
    from autopipe.sweep.supervisor import Supervisor

DIRECTORY = WORK_DIRECTORY / "sweeps"


def sweep(
    path: str | Path,
    *,
    devices: int | str | tuple[int, ...] | list[int] | None = None,
    resume: bool = False,
    sweep_dir: str | Path | None = None,
    jobs_per_device: int | str | None = None,
    on_event: Events | None = None,
    stop: StopEvent | None = None,
) -> SweepResult:
    """Train the jobs of a sweep file, and return one row a job, best first.

    ``devices``: their number, or which; it replaces that of the file. ``resume``: continue the sweep of ``sweep_dir``,
    whose default is ``.autopipe/sweeps/NAME``. ``jobs_per_device``: how many jobs may share a device, or ``"auto"``; it
    replaces that of the file. ``on_event``: called with the kind and the fields of each event.
    ``stop``: once its ``is_set()`` returns true, every job stops after its minibatch, with a checkpoint; without it,
    signals request that. A job that fails is a row with its error.

    Raises: RunError that names the key of the file, or if the folder has another sweep; ValueError for ``devices`` and
    ``jobs_per_device``.
    """
    with _begun(path, devices, resume, sweep_dir, jobs_per_device, on_event, stop) as supervisor:
        supervisor.run()
    return _result(supervisor)


def timetable(
    path: str | Path,
    *,
    devices: int | str | tuple[int, ...] | list[int] | None = None,
    resume: bool = False,
    sweep_dir: str | Path | None = None,
    jobs_per_device: int | str | None = None,
    on_event: Events | None = None,
) -> Timetable:
    """Prepare the jobs of a sweep file, and predict its course without training. The arguments are those of ``sweep``.

    A sweep in the same folder reuses the profiles and plans.

    Raises: KeyboardInterrupt if a signal requested a stop before that; the errors of ``sweep``.
    """
    from autopipe.sweep.timetable import predict

    with _begun(path, devices, resume, sweep_dir, jobs_per_device, on_event, None) as supervisor:
        supervisor.only_prepare = True
        if not supervisor.run():
            raise KeyboardInterrupt
    return predict(supervisor)


@contextlib.contextmanager
def _begun(
    path: str | Path,
    devices: Any,
    resume: bool,
    sweep_dir: str | Path | None,
    jobs_per_device: int | str | None,
    on_event: Events | None,
    stop: Any,
) -> Iterator[Supervisor]:
    """Validate everything, lock the folder, and yield the supervisor of the sweep."""
    refuse_unguarded()
    file = read_sweep(Path(path))
    wanted = file.devices if devices is None else parse_devices(devices)
    places = file.jobs_per_device if jobs_per_device is None else parse_jobs_per_device(jobs_per_device)
    from autopipe.sweep.devices import find_devices
    from autopipe.sweep.job_table import Board
    from autopipe.sweep.sharing import places_wanted
    from autopipe.sweep.supervisor import Supervisor
    from autopipe.workers.fork_server import preload

    shared_devices = find_devices(wanted, file.jobs, str(path))
    folder = state.Folder(_directory(file, sweep_dir))
    requested = StopRequest(None if stop is None else stop.is_set)
    with only_one(folder.path, "runs a sweep"):
        begun = state.begin(folder, file, resume=resume)
        places = places_wanted(begun.jobs_per_device, places)
        preload(("autopipe.sweep.job_process",))  # what the processes run: an import of a second
        board = Board.of(file, folder, begun.jobs)
        with requested.on_signals() if stop is None else contextlib.nullcontext():
            events = on_event or ignore_event
            yield Supervisor(file, board, shared_devices, places, events, lambda: requested.signal_name)


def _directory(file: SweepFile, given: str | Path | None) -> Path:
    """Return the absolute folder of a sweep: its jobs may run in other folders later."""
    directory = DIRECTORY / file.path.stem if given is None else Path(given)
    if "\0" in os.fspath(directory):
        raise RunError(f"{directory!r} is not a path", remedy="choose another --sweep-dir")
    return directory.absolute()


def _result(supervisor: Supervisor) -> SweepResult:
    rows = sorted(supervisor.board.rows(), key=_order)
    return SweepResult(
        jobs=tuple(rows),
        metric=supervisor.sweep.metric,
        seconds=supervisor.seconds,
        directory=str(supervisor.folder.path),
        results=str(supervisor.folder.results),
        jobs_per_device=supervisor.sharing.places,
        stopped=any(row.status not in state.ENDED for row in rows),
        events=tuple(supervisor.happened),
        notes=tuple(supervisor.notes),
    )


def _order(row: SweepRow) -> tuple[int, float, int]:
    """Order rows: done and not done jobs by their metric, then those that were dropped, then failures."""
    group = {state.FAILED: 2, state.DROPPED: 1}.get(row.status, 0)
    return group, math.inf if row.metric is None else row.metric, row.number

"""The predicted course of a sweep, from the profiles of its jobs and the scheduler itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopipe.report.results import PlannedLease, Timetable
from autopipe.sweep import state
from autopipe.sweep.scheduling.leases import Waiting, assign

if TYPE_CHECKING:
    from autopipe.sweep.supervisor import Supervisor


def predict(supervisor: Supervisor) -> Timetable:
    """Return the timetable of the jobs that are not finished."""
    board, lease = supervisor.board, supervisor.sweep.lease_seconds
    failures = {entry.job.name: entry.record.error for entry in board.entries if entry.record.status == state.FAILED}
    jobs, unknown = [], []
    for entry in board.unfinished():
        seconds = entry.seconds_to_end()
        if seconds is None:
            unknown.append(entry.job.name)
        else:
            jobs.append((entry.job.number, seconds, entry.job.devices))
    leases = simulate(jobs, supervisor.devices.indices, lease)
    names = {entry.job.number: entry.job.name for entry in board.entries}
    count = len(supervisor.devices.indices)
    bound = max([sum(seconds * devices for _, seconds, devices in jobs) / count, *(s for _, s, _ in jobs)], default=0.0)
    notes = [f"the length of {name} is not known: it is not in the timetable" for name in unknown]
    if supervisor.sweep.halving is not None:
        notes.append("[stop] is left out: every job is counted to its end")
    return Timetable(
        leases=tuple(PlannedLease(names[job], on, start, end) for job, on, start, end in leases),
        seconds=max((end for *_, end in leases), default=0.0),
        bound=bound,
        step_seconds={entry.job.name: entry.step_seconds for entry in board.entries if entry.structure.prepared},
        notes=(*supervisor.notes, *notes),
        failures=failures,
    )


def simulate(
    jobs: list[tuple[int, float, int]], devices: tuple[int, ...], lease: float
) -> list[tuple[int, tuple[int, ...], float, float]]:
    """Return (job, devices, start, end) of each lease, by start. ``jobs``: (number, seconds, number of devices).

    The scheduler is asked at each end of a job and of a lease, as ``Supervisor`` does it continuously.
    """
    left = {number: seconds for number, seconds, _ in jobs}
    width = {number: count for number, _, count in jobs}
    running: dict[int, tuple[tuple[int, ...], float]] = {}  # job -> devices and start
    leases: list[tuple[int, tuple[int, ...], float, float]] = []
    now = 0.0
    while left:
        waiting = [
            Waiting(number, seconds, width[number], running[number][0], now - running[number][1])
            if number in running
            else Waiting(number, seconds, width[number])
            for number, seconds in left.items()
        ]
        chosen = assign(waiting, devices, lease=lease)
        for number in [number for number in running if number not in chosen]:
            on, start = running.pop(number)
            leases.append((number, on, start, now))
        running |= {number: (on, now) for number, on in chosen.items() if number not in running}
        passes = min([lease / 4, *(left[number] for number in running)])
        now += passes
        for number in list(running):
            left[number] -= passes
            if left[number] <= 1e-9 * now:
                on, start = running.pop(number)
                leases.append((number, on, start, now))
                del left[number]
    return sorted(leases, key=lambda planned: (planned[2], planned[0]))

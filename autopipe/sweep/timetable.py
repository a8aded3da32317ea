"""The predicted course of a sweep, from the profiles of its jobs and the scheduler itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopipe.report.results import PlannedLease, Timetable
from autopipe.sweep import state
from autopipe.sweep.sharing import as_models
from autopipe.sweep.simulator import bound, makespan, simulate

if TYPE_CHECKING:
    from autopipe.sweep.supervisor import Supervisor


def predict(supervisor: Supervisor) -> Timetable:
    """Return the timetable of the jobs that are not finished."""
    entries, devices = supervisor.board.entries, supervisor.devices.indices
    jobs = as_models(supervisor.board.unfinished())
    notes = list(supervisor.notes)
    for entry in supervisor.board.unfinished():
        if not entry.length:
            notes.append(f"the length of {entry.job.name} is not known: it is not in the timetable")
    if supervisor.sweep.halving is not None:
        notes.append("[stop] is left out: every job is counted to its end")
    places = supervisor.sharing.places
    leases = simulate(jobs, devices, lease=supervisor.sweep.lease_seconds, places=places)
    names = {entry.job.number: entry.job.name for entry in entries}
    return Timetable(
        leases=tuple(PlannedLease(names[row.job], row.devices, row.start, row.end) for row in leases),
        seconds=makespan(leases),
        bound=bound(jobs, len(devices)),
        jobs_per_device=places,
        step_seconds={entry.job.name: entry.step_seconds for entry in entries if entry.structure.prepared},
        notes=tuple(notes),
        failures={entry.job.name: entry.record.error for entry in entries if entry.record.status == state.FAILED},
    )

"""Which jobs run on which devices: longest remaining time first, in leases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """An unfinished job, running or not."""

    job: int  # its number
    remaining: float  # seconds that it still needs, predicted, then measured
    devices: int  # how many devices it takes together
    on: tuple[int, ...] = ()  # the devices on which it runs now; empty where it does not run
    ran: float = 0.0  # seconds since its lease began (0 where it does not run)


def assign(jobs: Sequence[Waiting], devices: Sequence[int], *, lease: float) -> dict[int, tuple[int, ...]]:
    """Return the devices of each job that should run now; a running job that is absent is to be preempted.

    Longest remaining time first. A running job keeps its devices unless its lease has ended and a waiting job is behind
    it by more than a lease.
    """
    running = {job.job: job for job in jobs if job.on}
    chosen = {number: job.on for number, job in running.items()}
    free = [device for device in devices if not any(device in on for on in chosen.values())]
    for job in sorted((job for job in jobs if not job.on), key=lambda job: (-job.remaining, job.job)):
        ended = [
            other
            for number, other in running.items()
            if number in chosen and other.ran >= lease and job.remaining - other.remaining > lease
        ]
        ended.sort(key=lambda other: other.remaining)
        while len(free) < job.devices and ended:
            free.extend(chosen.pop(ended.pop(0).job))
        if len(free) < job.devices:
            if job.devices > 1:
                break  # shorter jobs do not take the devices for which it waits
            continue
        chosen[job.job] = tuple(sorted(free)[: job.devices])
        free = [device for device in free if device not in chosen[job.job]]
    return chosen

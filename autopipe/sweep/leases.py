"""Which jobs run on which devices: longest remaining time first, in leases.

A device has one place, or several if jobs may share it (SHARP). A job that shares takes one place; any other job takes
all places of each of its devices.

A job of several devices that must wait for them is not overtaken for long: a shorter job takes one of the free devices
only if it can be moved away again before the others are free.
"""

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
    shares: bool = False  # whether it takes one place of a device, next to others
    computes: float = 0.0  # of the remaining time, the seconds that it computes; needed of a job that shares
    copies: float = 0.0  # and the seconds of its copies from the host, which overlap with computation

    def movable_in(self, lease: float, longest: float, *, preempts: bool) -> float:
        """Return the seconds until it ends, or may be preempted for a job with ``longest`` remaining seconds.

        ``preempts``: whether that job may preempt others.
        """
        if not preempts:
            return max(0.0, self.remaining)
        return max(0.0, min(self.remaining, max(lease - self.ran, self.remaining - longest + lease)))


def assign(
    jobs: Sequence[Waiting], devices: Sequence[int], *, lease: float, places: int = 1
) -> dict[int, tuple[int, ...]]:
    """Return the devices of each job that should run now; a running job that is absent is to be preempted.

    Longest remaining time first. A running job keeps its devices unless its lease has ended and a waiting job is behind
    it by more than a lease, and could be the last to end: with all places in use until then, a preemption for any other
    job would gain nothing. ``places``: of each device. Among the devices with a free place, a job that shares gets the
    one on which the longer of all computation and all copies is then the shortest.
    """
    board = _Board(jobs, devices, places)
    # until all jobs are done, at least
    least = sum(job.remaining * board.needs(job) for job in jobs) / max(len(devices) * places, 1)
    head: Waiting | None = None  # the longest of the jobs that wait for more than one place
    for job in sorted((job for job in jobs if not job.on), key=lambda job: (-job.remaining, job.job)):
        if head is not None:
            begun_now = min(job.remaining, lease)
            if begun_now <= board.free_in(head, lease, preempts=head.remaining + lease >= least):
                board.place(job, ())
            continue
        ended = [
            other
            for other in board.running.values()
            if job.remaining + lease >= least
            and other.on
            and other.ran >= lease
            and job.remaining - other.remaining > lease
        ]
        if not board.place(job, ended) and board.needs(job) > 1:
            head = job
    return board.chosen


class _Board:
    """The places of all devices, and who has them."""

    def __init__(self, jobs: Sequence[Waiting], devices: Sequence[int], places: int) -> None:
        self._places = places
        self._on: dict[int, list[Waiting]] = {device: [] for device in devices}
        self.chosen: dict[int, tuple[int, ...]] = {}
        self.running: dict[int, Waiting] = {}
        for job in jobs:
            if job.on:
                self._add(job, job.on)

    def needs(self, job: Waiting) -> int:
        """Return how many places it needs, over all devices."""
        return self._each(job) * job.devices

    def place(self, job: Waiting, preemptible: Sequence[Waiting]) -> bool:
        """Give a job its devices if they are free, or if preemptible jobs leave them. Return whether it has them."""
        options = []
        for device in self._on:
            leave = self._leaving(device, self._each(job), preemptible)
            if leave is not None:
                longest = max((other.remaining for other in leave), default=-1.0)
                options.append((longest, self._load(device, job), device, leave))
        options.sort(key=lambda option: option[:3])
        if len(options) < job.devices:
            return False
        taken = options[: job.devices]
        for other in {other.job: other for *_, leave in taken for other in leave}.values():
            self._remove(other)
        self._add(job, tuple(sorted(device for _, _, device, _ in taken)))
        return True

    def free_in(self, job: Waiting, lease: float, *, preempts: bool) -> float:
        """Return the seconds until a job that waits for places can have them."""
        times = []
        for residents in self._on.values():
            free, after = self._places - self._used(residents), 0.0
            for movable, other in sorted(
                ((other.movable_in(lease, job.remaining, preempts=preempts), other) for other in residents),
                key=lambda pair: pair[0],
            ):
                if free < self._each(job):
                    free, after = free + self._each(other), movable
            times.append(after)
        times.sort()
        return times[job.devices - 1] if job.devices <= len(times) else 0.0

    def _each(self, job: Waiting) -> int:
        return 1 if job.shares else self._places

    def _used(self, residents: Sequence[Waiting]) -> int:
        return sum(self._each(other) for other in residents)

    def _leaving(self, device: int, needed: int, preemptible: Sequence[Waiting]) -> list[Waiting] | None:
        """Return the jobs that leave a device so that places become free, the shortest ones; None: not possible."""
        free, leave = self._places - self._used(self._on[device]), []
        can = {other.job for other in preemptible}
        for other in sorted(self._on[device], key=lambda other: other.remaining):
            if free < needed and other.job in can:
                leave.append(other)
                free += self._each(other)
        return leave if free >= needed else None

    def _load(self, device: int, job: Waiting) -> float:
        """Return the seconds of all computation or of all copies on a device, of whichever there is more."""
        if not job.shares:
            return 0.0
        residents = [*self._on[device], job]
        return max(sum(other.computes for other in residents), sum(other.copies for other in residents))

    def _add(self, job: Waiting, on: tuple[int, ...]) -> None:
        self.chosen[job.job], self.running[job.job] = on, job
        for device in on:
            self._on[device].append(job)

    def _remove(self, job: Waiting) -> None:
        for device in self.chosen.pop(job.job):
            self._on[device].remove(job)
        del self.running[job.job]

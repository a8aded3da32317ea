"""The course of a sweep on paper: which job runs on which device, from when until when, under a policy.

The decisions are those of ``leases.assign``, as in a real sweep. A policy is its two numbers:

==================  ==========  =========
policy              lease       places
==================  ==========  =========
whole jobs          infinite    1
leases              seconds     1
shards (SHARP)      seconds     2 or more
==================  ==========  =========

Jobs that share a device alternate at the boundaries of shards: one of them computes at a time, and the others copy
meanwhile. After a shard, the job with the longest remaining time is next among those that wait with their shard on the
device (``token_keeper``). The copies of all jobs share its link in equal parts, and each job has two slabs: for
the shard that computes and for the next one.

Source of the policy: Hydra, arXiv:2110.08633 (SHARP: the job with the longest remaining time first).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopipe.schedules.spilling.spill import SLABS
from autopipe.sweep.leases import Waiting, assign

WHOLE = math.inf
"""The lease under which no job is preempted."""
# how often the scheduler is asked during a lease; a real sweep asks it several times a second
_ASKED = 4
_NEAR = 1e-7  # of a shard: rounding


@dataclass(frozen=True, slots=True)
class ModelJob:
    """A job, as its profile and its plan describe it."""

    job: int  # its number
    compute: float  # seconds that one shard computes
    copy: float = 0.0  # seconds of the copies of one shard, alone on the link; 0: its model stays on the device
    shards: int = 1  # over all steps: visits of a shard to the device
    devices: int = 1  # how many it takes together
    shares: bool = False  # whether it may share its device

    @property
    def each(self) -> float:
        """The seconds of one shard without other jobs: its copies overlap with the computation of the one before."""
        return max(self.compute, self.copy)

    @property
    def seconds(self) -> float:
        """The seconds of the job alone, with the copies of the first shard."""
        return self.copy + self.shards * self.each

    def divided(self, parts: int) -> ModelJob:
        """Return it with a part of the memory of the device: its shards are as many times smaller."""
        return dataclasses.replace(
            self, compute=self.compute / parts, copy=self.copy / parts, shards=self.shards * parts
        )


@dataclass(frozen=True, slots=True)
class Lease:
    """A row of the timetable."""

    job: int  # its number
    devices: tuple[int, ...]  # on which it runs
    start: float  # seconds since the sweep began
    end: float  # seconds since the sweep began


def simulate(
    jobs: Sequence[ModelJob], devices: Sequence[int], *, lease: float, places: int = 1, cost: float = 0.0
) -> list[Lease]:
    """Return the predicted timetable, by start.

    ``lease``: seconds, or ``WHOLE``; ``places``: of a device; ``cost``: seconds that a preempted job needs before it
    continues, which include its stop.

    Raises: ValueError for a job that needs more devices than there are.
    """
    for job in jobs:
        if job.devices > len(devices):
            raise ValueError(f"job {job.job} needs {job.devices} devices, and there are {len(devices)}")
    states = {job.job: _State(job) for job in jobs if job.seconds > 0}
    leases: list[Lease] = []
    now, ask_at = 0.0, 0.0
    while states:
        if now >= ask_at:
            waiting = [state.waiting(now) for state in states.values()]
            chosen = assign(waiting, devices, lease=lease, places=places)
            for number, state in states.items():
                if state.on and number not in chosen:
                    leases.append(state.leave(now))
            for number, on in chosen.items():
                if not states[number].on:
                    states[number].enter(on, now, cost)
            ask_at = now + lease / _ASKED
        groups = _groups(states.values())
        passes = min([*(group.next_event() for group in groups), ask_at - now])
        now += passes
        for group in groups:
            group.advance(passes)
        for number, state in list(states.items()):
            if state.done >= state.job.shards:
                leases.append(state.leave(now))
                del states[number]
                ask_at = now
    return sorted(leases, key=lambda planned: (planned.start, planned.job))


def makespan(leases: Sequence[Lease]) -> float:
    """Return the seconds until all jobs are done."""
    return max((planned.end for planned in leases), default=0.0)


def bound(jobs: Sequence[ModelJob], devices: int) -> float:
    """Return the seconds that no order of the jobs can fall below: the longest one, or all of them in equal parts.

    Of the jobs that share devices, either the computation or the copies count, of whichever there is more.
    """
    alone = sum(job.seconds * job.devices for job in jobs if not job.shares)
    sharing = [job for job in jobs if job.shares]
    computes, copies = sum(job.compute * job.shards for job in sharing), sum(job.copy * job.shards for job in sharing)
    shared = (alone + max(computes, copies)) / devices
    return max([shared, *(job.seconds for job in jobs)], default=0.0)


def most_places(
    jobs: Sequence[ModelJob], devices: Sequence[int], *, lease: float, cost: float, most: int = 4, gain: float = 1.05
) -> int:
    """Return how many jobs should share a device: 1, or the number with the shortest predicted course.

    ``jobs``: with the memory of a whole device each. ``most``: the largest number that is considered. A larger number
    must be ``gain`` times faster than a smaller one: every job gets a smaller part of the memory.
    """
    best, shortest = 1, makespan(simulate(jobs, devices, lease=lease, cost=cost))
    for places in range(2, min(most, sum(job.shares for job in jobs)) + 1):
        shared = [job.divided(places) if job.shares else job for job in jobs]
        seconds = makespan(simulate(shared, devices, lease=lease, places=places, cost=cost))
        if seconds * gain <= shortest:
            best, shortest = places, seconds
    return best


@dataclass(slots=True)
class _State:
    """The progress of a job."""

    job: ModelJob
    done: float = 0.0  # shards that have computed
    brought: float = 0.0  # shards whose copies are made
    on: tuple[int, ...] = ()
    since: float = 0.0
    pause: float = 0.0  # seconds until it can compute
    runs: int = 0  # leases so far
    had_turn: bool = False  # it was the last of its device that computed a shard

    @property
    def left(self) -> float:
        return self.job.shards - self.done

    def waiting(self, now: float) -> Waiting:
        job = self.job
        ran = now - self.since if self.on else 0.0
        times = self.left * job.each, job.devices, self.on, ran, job.shares
        return Waiting(job.job, *times, computes=self.left * job.compute, copies=self.left * job.copy)

    def enter(self, on: tuple[int, ...], now: float, cost: float) -> None:
        self.on, self.since = on, now
        self.pause = cost if self.runs else 0.0
        self.runs += 1
        self.brought = math.floor(self.done)

    def leave(self, now: float) -> Lease:
        row = Lease(self.job.job, self.on, self.since, now)
        self.on = ()
        return row

    def can_compute(self) -> bool:
        return not self.pause and (not self.job.copy or self.brought >= math.floor(self.done) + 1)

    def can_copy(self) -> bool:
        ahead = math.floor(self.brought) - math.floor(self.done)
        return not self.pause and self.job.copy > 0 and self.brought < self.job.shards and ahead < SLABS


@dataclass(slots=True)
class _Group:
    """The jobs of a device, or a job of several ones."""

    states: list[_State]

    def _computing(self) -> _State | None:
        """Return the job that computes. It began its shard, or has waited and has the longest remaining time."""
        able = [state for state in self.states if state.can_compute()]
        begun = [state for state in able if state.done % 1]
        waited = [state for state in able if not state.had_turn]
        return max(begun or waited or able, key=lambda state: state.left * state.job.each, default=None)

    def _rates(self) -> list[tuple[_State, float, float]]:
        """Return the shards that each job computes and copies in a second."""
        computing = self._computing()
        copying = [state for state in self.states if state.can_copy()]
        return [
            (
                state,
                1 / state.job.compute if state is computing and state.job.compute else 0.0,
                1 / (state.job.copy * len(copying)) if any(state is other for other in copying) else 0.0,
            )
            for state in self.states
        ]

    def next_event(self) -> float:
        """Return the seconds until a job begins, or ends a shard or its copies."""
        times = [state.pause for state in self.states if state.pause]
        if len(self.states) == 1:
            (state,) = self.states
            return times[0] if times else self._fill(state) + state.left * state.job.each
        for state, computes, copies in self._rates():
            if computes:
                times.append((math.floor(state.done) + 1 - state.done) / computes)
            if copies:
                times.append((math.floor(state.brought) + 1 - state.brought) / copies)
        return min(times)

    def advance(self, seconds: float) -> None:
        """Let time pass, at most until the next event."""
        if len(self.states) == 1 and not self.states[0].pause:
            self._alone(self.states[0], seconds)
            return
        rates = [] if len(self.states) == 1 else self._rates()
        for state, computes, copies in rates:
            state.done = _snapped(state.done + computes * seconds)
            state.brought = _snapped(state.brought + copies * seconds)
            if computes:
                for other in self.states:
                    other.had_turn = other is state
        for state in self.states:
            state.pause = 0.0 if state.pause <= seconds else state.pause - seconds

    @staticmethod
    def _fill(state: _State) -> float:
        """Return the seconds until the first shard can compute."""
        missing = math.floor(state.done) + 1 - state.brought
        return max(0.0, missing) * state.job.copy

    def _alone(self, state: _State, seconds: float) -> None:
        fill = self._fill(state)
        if fill:
            copied = min(seconds, fill)
            state.brought = _snapped(state.brought + copied / state.job.copy)
            seconds -= copied
        if seconds > 0:
            state.done = _snapped(min(state.job.shards, state.done + seconds / state.job.each))
            state.brought = max(state.brought, min(state.job.shards, math.floor(state.done) + 1.0))


def _groups(states: Iterable[_State]) -> list[_Group]:
    groups: dict[tuple[int, ...], _Group] = {}
    for state in states:
        if state.on:
            groups.setdefault(state.on, _Group([])).states.append(state)
    return list(groups.values())


def _snapped(shards: float) -> float:
    """Return a number of shards without rounding errors at their boundaries."""
    nearest = round(shards)
    return float(nearest) if abs(shards - nearest) < _NEAR else shards

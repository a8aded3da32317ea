"""The scheduler: properties of single decisions, and of decisions one after the other until all jobs are done."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.sweep.leases import Waiting, assign

LEASE = 60.0


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Waiting], list[int], int]:
    """Return jobs, of which some run, the devices, and the places of each."""
    devices = list(range(draw(st.integers(1, 8))))
    places = draw(st.integers(1, 3))
    free = dict.fromkeys(devices, places)
    jobs = []
    for number in range(1, draw(st.integers(1, 14)) + 1):
        shares = places > 1 and draw(st.booleans())
        wanted = 1 if shares else draw(st.sampled_from((1, 1, 1, 2, len(devices))))
        wanted, each = min(wanted, len(devices)), 1 if shares else places
        remaining = draw(st.floats(1, 1000))
        on: tuple[int, ...] = ()
        able = [device for device in devices if free[device] >= each]
        if len(able) >= wanted and draw(st.booleans()):
            on = tuple(able[:wanted])
            for device in on:
                free[device] -= each
        ran = draw(st.floats(0, 200)) if on else 0.0
        jobs.append(Waiting(number, remaining, wanted, on, ran, shares, remaining / 2, remaining / 3))
    return jobs, devices, places


def used(jobs: list[Waiting], chosen: dict[int, tuple[int, ...]], device: int, places: int) -> int:
    return sum(1 if job.shares else places for job in jobs if device in chosen.get(job.job, ()))


@given(situations())
def test_places_are_given_once_and_devices_together(situation: tuple[list[Waiting], list[int], int]) -> None:
    jobs, devices, places = situation
    chosen = assign(jobs, devices, lease=LEASE, places=places)
    for device in devices:
        assert used(jobs, chosen, device, places) <= places
    for job in jobs:
        if job.job in chosen:
            assert len(set(chosen[job.job])) == job.devices
            assert set(chosen[job.job]) <= set(devices)


@given(situations())
def test_only_ended_leases_are_preempted_for_jobs_far_behind(situation: tuple[list[Waiting], list[int], int]) -> None:
    jobs, devices, places = situation
    chosen = assign(jobs, devices, lease=LEASE, places=places)
    begun = [job for job in jobs if not job.on and job.job in chosen]
    preempted = [job for job in jobs if job.on and job.job not in chosen]
    shared = sum(job.remaining * job.devices * (1 if job.shares else places) for job in jobs) / len(devices) / places
    for job in preempted:
        assert job.ran >= LEASE
        # the other one is behind, and could end last
        behind = [other.remaining for other in begun if other.remaining - job.remaining > LEASE]
        assert any(remaining + LEASE >= shared * (1 - 1e-9) for remaining in behind)
    for job in jobs:
        if job.on and job.job in chosen:
            assert chosen[job.job] == job.on


@given(situations())
def test_a_preempted_job_makes_room_that_is_used(situation: tuple[list[Waiting], list[int], int]) -> None:
    jobs, devices, places = situation
    chosen = assign(jobs, devices, lease=LEASE, places=places)
    for job in jobs:
        if job.on and job.job not in chosen:
            longer = {j.job for j in jobs if not j.on and j.remaining - job.remaining > LEASE and j.job in chosen}
            assert any(set(chosen[number]) & set(job.on) for number in longer)


@given(situations())
def test_a_device_is_idle_only_if_nothing_fits(situation: tuple[list[Waiting], list[int], int]) -> None:
    jobs, devices, places = situation
    chosen = assign(jobs, devices, lease=LEASE, places=places)
    waiting = [job for job in jobs if job.job not in chosen and not job.on]
    idle = [device for device in devices if not used(jobs, chosen, device, places)]
    fitting = [job for job in waiting if job.devices <= len(idle)]
    # what fits an idle device may only wait where a longer job waits for several devices
    for job in fitting:
        assert any(
            other.remaining >= job.remaining and other is not job and (other.devices > 1 or places > 1)
            for other in waiting
        )


@given(situations())
def test_the_longest_waiting_job_of_one_device_gets_the_first_free_one(
    situation: tuple[list[Waiting], list[int], int],
) -> None:
    jobs, devices, places = situation
    chosen = assign(jobs, devices, lease=LEASE, places=places)
    idle_before = [device for device in devices if not any(device in job.on for job in jobs)]
    waiting = sorted((job for job in jobs if not job.on), key=lambda job: (-job.remaining, job.job))
    if waiting and len(idle_before) >= waiting[0].devices:
        assert waiting[0].job in chosen


def run(jobs: list[Waiting], devices: list[int], places: int) -> tuple[dict[int, float], dict[int, int], float]:
    """Decide every tenth of a lease until all jobs are done. Return ends, leases of each job, and the end."""
    now, ends, leases = 0.0, {}, {job.job: 0 for job in jobs}
    state = {job.job: dataclasses.replace(job, on=(), ran=0.0) for job in jobs}
    while state:
        chosen = assign(list(state.values()), devices, lease=LEASE, places=places)
        assert chosen, "some job runs"
        now += LEASE / 10
        for number, job in list(state.items()):
            if number not in chosen:
                state[number] = dataclasses.replace(job, on=(), ran=0.0)
                continue
            leases[number] += not job.on
            left = job.remaining - LEASE / 10
            state[number] = dataclasses.replace(job, on=chosen[number], ran=job.ran + LEASE / 10, remaining=left)
            if left <= 0:
                ends[number] = now
                del state[number]
    return ends, leases, now


@settings(deadline=None)
@given(situations())
def test_all_jobs_end_and_none_has_more_leases_than_its_length_allows(
    situation: tuple[list[Waiting], list[int], int],
) -> None:
    jobs, devices, places = situation
    ends, leases, _ = run(jobs, devices, places)
    assert set(ends) == {job.job for job in jobs}
    for job in jobs:
        assert leases[job.job] <= 1 + job.remaining / LEASE


def test_short_jobs_do_not_keep_a_job_of_all_devices_waiting() -> None:
    wide = Waiting(1, 600.0, 2)
    short = [Waiting(number, 45.0, 1, (), 0.0) for number in range(2, 40)]
    running = [Waiting(40, 45.0, 1, (0,), 30.0), Waiting(41, 45.0, 1, (1,), 0.0)]
    state = {job.job: job for job in [wide, *short, *running]}
    now = 0.0
    while not state[1].on:
        chosen = assign(list(state.values()), [0, 1], lease=LEASE)
        now += 5
        for number, job in list(state.items()):
            on = chosen.get(number, ())
            state[number] = dataclasses.replace(job, on=on, ran=job.ran + 5, remaining=job.remaining - 5 * bool(on))
            if state[number].remaining <= 0:
                del state[number]
    assert now <= 60


def test_a_running_job_is_not_preempted_for_a_job_that_cannot_begin_yet() -> None:
    ended = Waiting(1, 10.0, 1, (0,), 100.0)
    fresh = Waiting(2, 500.0, 1, (1,), 0.0)
    assert assign([ended, fresh, Waiting(3, 900.0, 2)], [0, 1], lease=LEASE) == {1: (0,), 2: (1,)}


def test_jobs_that_share_are_spread_first_and_then_complement_one_another() -> None:
    computing = [Waiting(n, 1000.0, 1, (), 0.0, True, 1000.0, 200.0) for n in (1, 2)]
    copying = [Waiting(n, 900.0, 1, (), 0.0, True, 200.0, 900.0) for n in (3, 4)]
    chosen = assign([*computing, *copying], [0, 1], lease=LEASE, places=2)
    assert {chosen[1], chosen[2]} == {(0,), (1,)}
    assert {chosen[3], chosen[4]} == {(0,), (1,)}


def test_a_job_that_does_not_share_gets_a_device_of_its_own() -> None:
    jobs = [Waiting(1, 900.0, 1, (), 0.0, True, 500.0, 900.0), Waiting(2, 800.0, 1), Waiting(3, 700.0, 1)]
    assert assign(jobs, [0, 1], lease=LEASE, places=2) == {1: (0,), 2: (1,)}

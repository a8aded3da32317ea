"""The simulated course of a sweep: conservation of time, bounds, and what sharing a device is worth."""

from __future__ import annotations

import itertools
import random

import pytest

from autopipe.sweep.simulator import WHOLE, Lease, ModelJob, bound, makespan, most_places, simulate

COMPUTING = ModelJob(1, compute=1.0, copy=0.2, shards=200, shares=True)
COPYING = ModelJob(2, compute=0.2, copy=1.0, shards=200, shares=True)


def spans_of(leases: list[Lease], device: int) -> list[tuple[float, float]]:
    return sorted((lease.start, lease.end) for lease in leases if device in lease.devices)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("lease", [60.0, WHOLE])
def test_each_job_gets_its_time_and_each_preemption_costs(seed: int, lease: float) -> None:
    draw = random.Random(seed)
    count = draw.choice((1, 2, 4))
    jobs = [
        ModelJob(n, draw.uniform(1, 500), devices=draw.choice((1, 1, count))) for n in range(1, draw.randint(2, 12))
    ]
    leases = simulate(jobs, range(count), lease=lease, cost=2.0)
    for job in jobs:
        own = [row for row in leases if row.job == job.job]
        # a preempted job may have to leave before it continues
        spent = sum(row.end - row.start for row in own)
        assert spent == pytest.approx(job.seconds + 2.0 * (len(own) - 1))
        assert {len(row.devices) for row in own} == {job.devices}
        if lease == WHOLE:
            assert len(own) == 1
    for device in range(count):
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans_of(leases, device)))
    assert makespan(leases) >= bound(jobs, count) - 1e-6


@pytest.mark.parametrize("kind", ["equal", "unequal"])
@pytest.mark.parametrize("devices", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("count", [4, 5, 7, 12, 20, 32])
def test_leases_are_near_the_bound(count: int, devices: int, kind: str) -> None:
    draw = random.Random(count * devices)
    jobs = [ModelJob(n, 3600.0 if kind == "equal" else draw.uniform(900, 7200)) for n in range(count)]
    leases = simulate(jobs, range(devices), lease=120.0, cost=3.0)
    assert makespan(leases) <= 1.05 * bound(jobs, devices)


def test_whole_jobs_leave_devices_idle() -> None:
    jobs = [ModelJob(n, 3600.0) for n in range(5)]
    assert makespan(simulate(jobs, range(4), lease=WHOLE)) == pytest.approx(7200.0)


def test_copies_overlap_with_the_computation_of_another_job() -> None:
    alone = makespan(simulate([COMPUTING, COPYING], [0], lease=WHOLE))
    shared = makespan(simulate([COMPUTING, COPYING], [0], lease=WHOLE, places=2))
    assert alone == pytest.approx(COMPUTING.seconds + COPYING.seconds)
    # both need the link and the processor for 240 s
    assert 240 <= shared <= 1.05 * 240


@pytest.mark.parametrize("job", [COMPUTING, COPYING])
def test_two_jobs_that_need_the_same_gain_nothing(job: ModelJob) -> None:
    jobs = [ModelJob(n, job.compute, job.copy, job.shards, shares=True) for n in (1, 2)]
    shared = makespan(simulate(jobs, [0], lease=WHOLE, places=2))
    assert shared == pytest.approx(2 * job.seconds, rel=0.02)


def test_a_resource_is_never_used_faster_than_it_is() -> None:
    draw = random.Random(0)
    for _ in range(20):
        count = draw.randint(2, 4)
        jobs = [
            ModelJob(n, draw.uniform(0.1, 2), draw.uniform(0.1, 2), draw.randint(1, 60), shares=True)
            for n in range(count)
        ]
        seconds = makespan(simulate(jobs, [0], lease=30.0, places=count))
        assert seconds >= max(sum(j.shards * j.compute for j in jobs), sum(j.shards * j.copy for j in jobs)) - 1e-6
        assert seconds <= sum(job.seconds for job in jobs) * 1.05


def test_jobs_share_devices_only_where_that_pays() -> None:
    def mix(*kinds: ModelJob) -> list[ModelJob]:
        return [ModelJob(n, k.compute, k.copy, k.shards, shares=k.shares) for n, k in enumerate(kinds)]

    plain = ModelJob(0, 1.0, 0.0, 200)
    assert most_places(mix(COMPUTING, COPYING), [0], lease=60, cost=3) == 2
    assert most_places(mix(COMPUTING, COMPUTING), [0], lease=60, cost=3) == 1
    assert most_places(mix(COPYING, COPYING), [0], lease=60, cost=3) == 1
    assert most_places(mix(plain, plain, plain), [0, 1], lease=60, cost=3) == 1


def test_a_job_of_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="job 1 needs 3 devices, and there are 2"):
        simulate([ModelJob(1, 5.0, devices=3)], [0, 1], lease=60.0)


def test_no_jobs_take_no_time() -> None:
    assert makespan(simulate([], [0, 1], lease=60.0)) == 0.0

"""The predicted course of a sweep: no device is used twice at a time, and every job gets its time."""

from __future__ import annotations

import itertools
import random

import pytest

from autopipe.sweep.timetable import simulate


@pytest.mark.parametrize("seed", range(20))
def test_each_job_gets_its_seconds_on_its_devices(seed: int) -> None:
    draw = random.Random(seed)
    devices = tuple(range(draw.choice((1, 2, 4))))
    jobs = [(n, draw.uniform(1, 500), draw.choice((1, 1, len(devices)))) for n in range(1, draw.randint(2, 12))]
    leases = simulate(jobs, devices, 60.0)
    for number, seconds, width in jobs:
        own = [(on, end - start) for job, on, start, end in leases if job == number]
        assert sum(length for _, length in own) == pytest.approx(seconds)
        assert {len(on) for on, _ in own} == {width}
    for device in devices:
        spans = sorted((start, end) for _, on, start, end in leases if device in on)
        assert all(first[1] <= second[0] + 1e-9 for first, second in itertools.pairwise(spans))
    bound = max(sum(s * w for _, s, w in jobs) / len(devices), max(s for _, s, _ in jobs))
    assert max(end for *_, end in leases) >= bound - 1e-6


def test_equal_jobs_alternate_in_leases() -> None:
    leases = simulate([(1, 300.0, 1), (2, 300.0, 1), (3, 300.0, 1)], (0, 1), 30.0)
    assert max(end for *_, end in leases) < 1.15 * 450
    assert len(leases) > 3


def test_nothing_to_do_takes_no_time() -> None:
    assert simulate([], (0, 1), 60.0) == []

"""Successive halving: who goes on, and up to which step."""

import math

from autopipe.sweep.halving import Halving, best


def test_the_best_share_goes_on_rounded_up():
    metrics = {1: 3.0, 2: 1.0, 3: 2.0, 4: 0.5, 5: 9.0}
    assert best(metrics, 0.5) == {4, 2, 3}
    assert best(metrics, 0.2) == {4}
    assert best({7: 1.0}, 0.1) == {7}
    assert best({}, 0.5) == set()


def test_jobs_without_a_metric_are_the_worst_and_the_first_of_equal_ones_goes_on():
    assert best({1: None, 2: math.nan, 3: 100.0, 4: math.inf}, 0.25) == {3}
    assert best({1: 1.0, 2: 1.0, 3: 1.0}, 0.3) == {1}


def test_a_job_trains_to_the_next_comparison_or_its_end():
    halving = Halving((200, 600), 0.5)
    assert [halving.target(rung, 2000) for rung in range(4)] == [200, 600, 2000, 2000]
    assert halving.target(1, 500) == 500

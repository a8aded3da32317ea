"""Why a run was slower than predicted: the causes, the largest first, with figures."""

import pytest
from support.stored_profiles import stored_profile

from autopipe.commands.planning.choose import choose_plan
from autopipe.commands.store import Work
from autopipe.planning.requests import PlanRequest
from autopipe.report.slower import Speed, speed_of


@pytest.fixture
def plan(tmp_path):
    """A plan of two stages: 8 samples in a step, each 120 ms a stage."""
    request = PlanRequest(gpus=2, replicas="never", num_microbatches=4, schedule="1f1b")
    return choose_plan(stored_profile(), request, Work.begin(tmp_path, None), 8).plan


def spent(plan, seconds=0.0, **more):
    """Return what a rank spent on ten steps that took as long as planned, and more."""
    computing = 10 * plan.num_microbatches * plan.stages[0].seconds
    row = {"computing": computing, "waiting": 10 * plan.predicted.step_seconds - computing, "data": 0.0, "saving": 0.0}
    row |= {"recording": 0.0, "ready": 0.0, "cpu": 0.0}
    return {name: value + more.get(name, 0.0) for name, value in row.items()}


def of(plan, rows, **options):
    whole = sum(rows[0][name] for name in ("computing", "waiting", "data", "saving", "recording"))
    given = {"steps": 10, "threads": 1, "cores": 2, "others": 0.0} | options
    return speed_of(plan, 80 / whole, rows, **given)


def test_a_run_as_fast_as_predicted_needs_no_reason(plan):
    assert of(plan, [spent(plan)] * 2).line == ""
    assert Speed(0.0, 10.0).line == ""


@pytest.mark.parametrize(
    ("more", "options", "first"),
    [
        ({"data": 10.0}, {}, "reading data took "),
        ({"saving": 10.0}, {}, "checkpoints and audits took "),
        ({"recording": 10.0}, {}, "recording batches of other shapes took "),
        ({"waiting": 10.0}, {}, "ranks waited for messages and one another for "),
        ({"computing": 10.0}, {}, "computing took "),
        ({"computing": 10.0, "ready": 9.9}, {"others": 1.5}, "ranks waited for a core for "),
    ],
)
def test_the_largest_cause_is_named_first(plan, more, options, first):
    speed = of(plan, [spent(plan, **more)] * 2, **options)
    assert speed.causes[0].startswith(first)
    assert len(speed.causes) == 1
    assert f"{speed.predicted / speed.measured:.1f} times slower than predicted: {first}" in speed.line
    assert ("other programs used 1.5 of 2 cores" in speed.line) == bool(options)


def test_ranks_that_share_cores_are_counted(plan):
    line = of(plan, [spent(plan, computing=10.0, ready=9.9)] * 2, threads=3).line
    assert "2 ranks with 3 threads each share 2 cores" in line
    assert "share" not in of(plan, [spent(plan, computing=10.0, ready=9.9)] * 2, threads=0).line

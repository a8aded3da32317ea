import inspect
import sys

import pytest

from autopipe.ir.schedule import ScheduleSpec, StageEdges
from autopipe.schedules import REGISTRY, Costs, lower, make, render, simulate, validate
from autopipe.schedules.kind import line


@pytest.mark.parametrize("name", REGISTRY)
def test_the_drawing_in_the_docstring_equals_the_schedule(name):
    kind = REGISTRY[name]
    docstring = inspect.getdoc(sys.modules[kind.make.__module__]) or ""
    drawn = [text.strip() for text in docstring.splitlines() if text.strip().startswith("rank ")]
    assert drawn == render(make(name, kind.example)).splitlines()


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p", range(1, 9))
def test_a_flushed_pipeline_takes_two_units_for_each_of_m_plus_p_minus_1(name, p):
    for m in range(1, 9):
        schedule = make(name, line(p, m))
        validate(schedule)
        timeline = simulate(lower(schedule, StageEdges.chain(p)), Costs.uniform(p))
        assert timeline.seconds == 2 * (m + p - 1)
        assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


def test_round_robin_gives_microbatch_j_of_minibatch_t_to_replica_t_m_plus_j():
    schedule = make("1f1b", ScheduleSpec(((0, 1), (2,)), 3, 2))
    row = " ".join(str(i) for i in schedule.rows[0])
    assert row == "0F0@0 0F2@0 0B0@0 0B2@0 0R 0S@0 0F1:1@1 0B1:1@1 0R1 0S1@1"

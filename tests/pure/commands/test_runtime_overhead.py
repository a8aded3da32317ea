"""The runtime overhead of a simulated run is recovered from its record."""

import itertools
from dataclasses import replace

import pytest
from support.planning_cases import even_profile

from autopipe.commands.calibration.runtime_overhead import Record, fit_overhead
from autopipe.ir.cluster import Cluster, ClusterDevice, Level, RuntimeOverhead
from autopipe.planning import PlanOptions, make_plan
from autopipe.planning.cost.predict import costs_of, predict, timeline_of

MINIBATCHES = 8


def cluster(host):
    return Cluster((Level("host", 2, 1e9, 1e-4),), (ClusterDevice("cpu", 1 << 34),), "measured", host)


def record(host, schedule, seconds=1e-3, factor=1.0, *, skips=False):
    """Return a simulated run of two ranks, whose computations take ``factor`` times the profiled time."""
    profile = even_profile(seconds=seconds, skips=skips)
    planned = make_plan(
        profile,
        cluster(RuntimeOverhead()),
        PlanOptions(num_ranks=2, batch_size=16, schedule=schedule, num_microbatches=4),
    )
    ran = replace(host, pace=factor * host.pace, compute_seconds=factor * host.compute_seconds)
    once = timeline_of(planned, profile, cluster(ran))
    taken = predict(planned, profile, cluster(ran)).step_seconds
    rows = []
    for rank in range(2):
        row = []
        for number in range(MINIBATCHES):
            for span in sorted((span for span in once.spans if span.rank == rank), key=lambda span: span.start_seconds):
                begin, end = (moment + number * taken for moment in (span.start_seconds, span.end_seconds))
                if row and span.instruction.op != "F":
                    begin = row[-1].end_seconds  # a rank waits in the instruction whose message it needs
                instruction = replace(span.instruction, minibatch=number)
                row.append(replace(span, instruction=instruction, start_seconds=begin, end_seconds=end))
        rows.append(tuple(row))
    return Record(planned, profile, cluster(RuntimeOverhead()), tuple(rows))


HOST = RuntimeOverhead(compute_seconds=1e-4, send_seconds=5e-5, receive_seconds=5e-5, step_seconds=3e-3)
LATE = (0.0, 0.3e-3, 2e-3)


@pytest.mark.parametrize(("late", "pace", "odd"), list(itertools.product(LATE, (1.0, 1.2), (1.0, 1.4))))
def test_the_simulated_overhead_is_recovered(late, pace, odd):
    planted = replace(HOST, delivery_seconds=late, pace=pace, value_seconds=2e-5)
    short, long = (
        [record(planted, schedule, seconds, factor) for schedule in ("gpipe", "1f1b") for factor in (1.0, odd, 1.0)]
        for seconds in (1e-3, 8e-3)
    )
    results = fit_overhead(0.0, short, long, [record(planted, "1f1b", skips=True)])
    assert results.value_seconds == pytest.approx(2e-5, rel=0.01)
    assert results.delivery_seconds == pytest.approx(late, rel=0.02, abs=1e-5)
    assert results.step_seconds == pytest.approx(3e-3, rel=0.01)
    assert results.pace == pytest.approx(pace, rel=0.001)
    assert results.compute_seconds == pytest.approx(1e-4, rel=0.01)
    assert results.send_seconds == pytest.approx(5e-5, rel=0.01)
    assert results.receive_seconds == pytest.approx(5e-5, rel=0.01)


@pytest.mark.parametrize(("late", "odd"), list(itertools.product(LATE, (1.0, 1.4))))
def test_the_delay_does_not_depend_on_the_slowdown_of_the_run(late, odd):
    planted = replace(HOST, delivery_seconds=late)
    short = [record(planted, "1f1b", factor=factor) for factor in (odd, 1.1, 1.2)]
    results = fit_overhead(0.0, short, [record(planted, "1f1b", 8e-3)], [record(planted, "1f1b", skips=True)])
    assert results.step_seconds == pytest.approx(3e-3, rel=0.01)
    assert results.delivery_seconds == pytest.approx(late, rel=0.02, abs=1e-5)


def test_ranks_as_fast_as_the_profile_in_long_stages_have_no_slowdown():
    results = fit_overhead(
        0.0, [record(HOST, "1f1b", factor=1.3)], [record(HOST, "1f1b", 8e-3)], [record(HOST, "1f1b", skips=True)]
    )
    assert results.pace == 1
    assert results.compute_seconds > HOST.compute_seconds


def test_there_is_no_slowdown_if_large_microbatches_take_as_long_as_small_ones():
    slow = replace(HOST, pace=1.5)
    run_record = fit_overhead(0.0, [record(HOST, "1f1b")], [record(slow, "1f1b", 1.001e-3)], [record(HOST, "1f1b")])
    assert (run_record.pace, run_record.value_seconds) == (1, 0)


def held_up(built, seconds):
    """Return the record with the first send of rank 0, and all that follows it, delayed in some minibatches."""
    late, row = 0.0, []
    for span in built.rows[0]:
        begin = span.start_seconds + late
        name = span.instruction
        late += seconds.get(name.minibatch, 0.0) if (name.op, name.microbatch) == ("SF", 0) else 0.0
        row.append(replace(span, start_seconds=begin, end_seconds=span.end_seconds + late))
    return replace(built, rows=(tuple(row), built.rows[1]))


def test_a_send_that_is_delayed_in_every_minibatch_counts():
    run_record = record(HOST, "1f1b")
    results = held_up(run_record, dict.fromkeys(range(MINIBATCHES), 1e-3))
    assert results.send_seconds == pytest.approx(run_record.send_seconds + 1e-3 / 8)  # two ranks send four messages
    assert results.minibatch_seconds == pytest.approx(run_record.minibatch_seconds + 1e-3)


def test_a_delay_in_a_single_minibatch_does_not_count():
    run_record = record(HOST, "1f1b")
    results = held_up(run_record, {3: 1.0})
    assert 3 not in results.typical
    assert results.send_seconds == pytest.approx(run_record.send_seconds)
    assert results.minibatch_seconds == pytest.approx(run_record.minibatch_seconds)


def test_a_later_message_lengthens_the_step():
    run_record = record(RuntimeOverhead(), "1f1b")
    seconds = [
        predict(run_record.plan, run_record.profile, cluster(RuntimeOverhead(delivery_seconds=d))).step_seconds
        for d in (0, 1e-3)
    ]
    assert seconds[1] > seconds[0] + 1e-3


def test_another_value_between_stages_costs_its_bytes_and_a_fixed_part():
    host = RuntimeOverhead(send_seconds=1e-3, send_seconds_per_byte=1e-8, receive_seconds=2e-3, value_seconds=3e-4)
    for skips, values in ((False, 1), (True, 2)):
        profile = even_profile(skips=skips)
        planned = make_plan(
            profile, cluster(host), PlanOptions(num_ranks=2, batch_size=16, schedule="1f1b", num_microbatches=4)
        )
        edge = costs_of(planned, profile, cluster(host)).edges[0, 1]
        assert edge.send_seconds == pytest.approx(1e-3 + (values - 1) * 3e-4 + values * 4 * 4000 * 1e-8)
        assert edge.receive_seconds == pytest.approx(2e-3 + (values - 1) * 3e-4)


def test_the_slowdown_of_ranks_scales_profiled_times_only():
    profile = even_profile()
    planned = make_plan(
        profile,
        cluster(RuntimeOverhead()),
        PlanOptions(num_ranks=2, batch_size=16, schedule="1f1b", num_microbatches=4),
    )
    alone, slower = (costs_of(planned, profile, cluster(replace(HOST, pace=pace))) for pace in (1.0, 1.5))
    for stage, a, b in zip(planned.stages, alone.stages, slower.stages, strict=True):
        assert b.forward_seconds == pytest.approx(a.forward_seconds + stage.forward_seconds / 2)
        assert b.backward_seconds == pytest.approx(a.backward_seconds + stage.backward_seconds / 2)
        assert b.step_seconds == a.step_seconds
    assert alone.edges == slower.edges


@pytest.mark.parametrize("pace", [0.9, 0.0, float("nan"), float("inf")])
def test_a_slowdown_below_one_is_refused(pace):
    with pytest.raises(ValueError, match="pace"):
        RuntimeOverhead(pace=pace)

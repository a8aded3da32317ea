"""The simulator compared with figures by hand, and the drawings of its timelines."""

from dataclasses import replace

import pytest

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import ScheduleSpec, StageEdges
from autopipe.ir.timeline import Span, Timeline
from autopipe.schedules import (
    Costs,
    EdgeCosts,
    StageBytes,
    StageCosts,
    lower,
    make,
    peak_bytes,
    render,
    render_timeline,
    simulate,
)
from autopipe.schedules.kind import line


def spans(timeline: Timeline, rank: int) -> list[tuple[str, float, float]]:
    return [(str(s.instruction), s.start_seconds, s.end_seconds) for s in timeline.spans if s.rank == rank]


def test_lowering_adds_receives_before_and_sends_after_and_sends_skips_directly():
    traffic = StageEdges(((0, 1), (0, 2), (1, 2)), ((1, 0), (2, 1)))
    lowered = lower(make("gpipe", line(3, 1)), traffic)
    assert [" ".join(str(i) for i in row) for row in lowered.rows] == [
        "0F0@0 0SF0>1 0SF0>2 0RB0<1 0B0@0 0S@0",
        "1RF0<0 1F0@0 1SF0>2 1RB0<2 1B0@0 1SB0>0 1S@0",
        "2RF0<0 2RF0<1 2F0@0 2B0@0 2SB0>1 2S@0",
    ]


def test_the_input_half_sends_the_gradient():
    lowered = lower(make("zero-bubble", line(2, 1)), StageEdges.chain(2))
    row = " ".join(str(i) for i in lowered.rows[1])
    assert row == "1RF0<0 1F0@0 1I0@0 1SB0>0 1W0@0 1S@0"


def test_neighbouring_stages_on_one_rank_exchange_no_message():
    lowered = lower(make("gpipe", ScheduleSpec(((0,), (0,), (1,)), 1)), StageEdges.chain(3))
    assert [str(i) for i in lowered.rows[0]][:4] == ["0F0@0", "1F0@0", "1SF0>2", "1RB0<2"]


def test_a_replica_sends_to_the_replica_that_runs_the_microbatch():
    lowered = lower(make("1f1b", ScheduleSpec(((0,), (1, 2)), 2)), StageEdges.chain(2))
    assert [str(i) for row in lowered.rows[1:] for i in row if i.op == "RF"] == ["1RF0<0", "1RF1<0"]


def test_lowering_twice_or_along_an_unknown_edge_is_refused():
    lowered = lower(make("gpipe", line(2, 1)), StageEdges.chain(2))
    with pytest.raises(ScheduleError, match="already has sends and receives"):
        lower(lowered, StageEdges.chain(2))
    with pytest.raises(ScheduleError, match="activations cannot go from stage 1 to stage 0 of 2"):
        lower(make("gpipe", line(2, 1)), StageEdges(((1, 0),), ()))
    with pytest.raises(ScheduleError, match="gradients cannot go from stage 2 to stage 1 of 2"):
        lower(make("gpipe", line(2, 1)), StageEdges((), ((2, 1),)))


def test_a_message_takes_its_time_on_the_link_and_then_the_latency():
    costs = Costs(
        (StageCosts(1, 2), StageCosts(1, 2)), {(0, 1): EdgeCosts(0.5, 0.25), (1, 0): EdgeCosts(latency_seconds=1)}
    )
    timeline = simulate(make("gpipe", line(2, 1)), costs)
    assert spans(timeline, 0) == [("0F0@0", 0, 1), ("0RB0<1", 1, 5.75), ("0B0@0", 5.75, 7.75)]
    assert spans(timeline, 1) == [("1RF0<0", 0, 1.75), ("1F0@0", 1.75, 2.75), ("1B0@0", 2.75, 4.75)]
    assert timeline.seconds == 7.75


def test_messages_queue_for_a_link():
    costs = Costs((StageCosts(1, 1), StageCosts(0, 0)), {(0, 1): EdgeCosts(3)})
    waits = [s for s in spans(simulate(make("gpipe", line(2, 3)), costs), 1) if "RF" in s[0]]
    assert [end for _, _, end in waits] == [4, 7, 10]  # not 4, 5, 6


def test_edges_in_one_direction_share_a_link_and_the_other_direction_does_not():
    request = ScheduleSpec(((0,), (1,), (0,), (1,)), 1)
    traffic = StageEdges(((0, 1), (0, 3), (1, 2), (2, 3)), ())
    costs = Costs((StageCosts(1, 0),) * 4, {(0, 1): EdgeCosts(2), (0, 3): EdgeCosts(10), (2, 3): EdgeCosts(1)})
    ends = {name: end for name, _, end in spans(simulate(lower(make("gpipe", request), traffic), costs), 1)}
    assert ends["1RF0<0"] == 3  # sent at 1
    assert ends["3RF0<0"] == 13  # queued behind it, on the link until 13; the one of stage 2, sent at 5, is behind both
    assert ends["3RF0<2"] == 14


def test_sending_and_receiving_take_time_of_the_rank():
    costs = Costs(
        (StageCosts(1, 1), StageCosts(1, 1)), {(0, 1): EdgeCosts(0, 0, send_seconds=0.5, receive_seconds=0.25)}
    )
    timeline = simulate(make("gpipe", line(2, 2)), costs)
    assert spans(timeline, 0)[:4] == [("0F0@0", 0, 1), ("0SF0>1", 1, 1.5), ("0F1@0", 1.5, 2.5), ("0SF1>1", 2.5, 3)]
    assert spans(timeline, 1)[0] == ("1RF0<0", 0, 1.75)


def test_a_reduction_waits_for_the_last_replica_and_the_step_follows():
    costs = Costs((StageCosts(1, 2, step_seconds=0.5, reduce_seconds=4),))
    timeline = simulate(make("1f1b", ScheduleSpec(((0, 1),), 3)), costs)
    assert spans(timeline, 0)[-2:] == [("0R", 6, 10), ("0S@0", 10, 10.5)]
    assert spans(timeline, 1)[-2:] == [("0R", 3, 10), ("0S@0", 10, 10.5)]


def test_buckets_of_a_reduction_start_during_the_last_backward():
    schedule = make("1f1b", ScheduleSpec(((0, 1),), 2))
    for buckets, reduce, end in ((1, 4, 9), (4, 4, 6), (4, 0.8, 5.2), (4, 2, 5.5)):
        # F to 1, B to 5: a quarter of B is done at 2, 3, 4, 5
        costs = Costs((StageCosts(1, 4, reduce_seconds=reduce, reduce_buckets=buckets),))
        assert simulate(schedule, costs).seconds == pytest.approx(end)


def test_a_reduction_of_2bw_overlaps_with_the_next_minibatch():
    request = ScheduleSpec(((0, 1), (2,)), 8, 9)

    def seconds(name, reduce):
        costs = Costs((StageCosts(1, 1, reduce_seconds=reduce), StageCosts(0.4, 0.4)))
        return simulate(make(name, request), costs).seconds

    assert seconds("2bw", 3) == seconds("2bw", 0) + 3  # only the last one is exposed
    assert seconds("1f1b", 3) == pytest.approx(seconds("1f1b", 0) + 9 * 3)


def test_the_slowest_stage_sets_the_pace():
    costs = Costs(tuple(StageCosts(f, 2 * f) for f in (1.0, 2.0, 1.0)))
    short, long = (simulate(make("1f1b", line(3, m)), costs).seconds for m in (20, 30))
    assert long - short == 10 * 6.0


def test_a_deeper_warm_up_hides_transfers():
    edges = {(a, b): EdgeCosts(0.0, 0.5) for a in range(4) for b in range(4)}
    costs = Costs((StageCosts(1, 1),) * 4, edges)
    plain, eager = (simulate(make(name, line(4, 32)), costs).seconds for name in ("1f1b", "eager-1f1b"))
    assert eager < plain
    assert eager == 2 * (32 + 3) + 3  # all transfers overlap, except those of the fill and the drain


def test_costs_that_do_not_fit_are_refused():
    with pytest.raises(ScheduleError, match="costs of 1 stages were given for 2 stages"):
        simulate(make("gpipe", line(2, 1)), Costs.uniform(1))
    with pytest.raises(ScheduleError, match="stage 0: forward_seconds must be finite and at least 0, and is -1"):
        Costs((StageCosts(-1, 1),))


def test_peak_bytes_count_versions_and_microbatches_in_flight():
    sizes = [StageBytes(fixed=1000, version=100, in_flight=1)] * 3
    assert peak_bytes(make("1f1b", line(3, 8)), sizes) == (1103, 1102, 1101)
    assert peak_bytes(make("gpipe", line(3, 8)), sizes) == (1108, 1108, 1108)
    assert peak_bytes(make("2bw", line(3, 8, 3)), sizes) == (1203, 1202, 1201)
    assert peak_bytes(make("pipedream", line(3, 1, 8)), sizes) == (1303, 1202, 1101)
    assert peak_bytes(make("pipedream", line(3, 1, 1)), sizes) == (1200, 1200, 1101)  # the step creates a version
    later = replace(line(3, 1, 1), first_minibatch=9)
    assert peak_bytes(make("pipedream", later), sizes) == (1301, 1201, 1101)
    with pytest.raises(ScheduleError, match="sizes of 1 stages were given for 3 stages"):
        peak_bytes(make("1f1b", line(3, 8)), sizes[:1])


def test_the_grid_names_stage_minibatch_and_version_if_they_differ():
    assert render(make("interleaved", ScheduleSpec(((0,), (1,), (0,), (1,)), 1))) == (
        "rank 0 | 0F0       2F0            2B0       0B0+\nrank 1 |      1F0       3F0  3B0       1B0+"
    )
    assert render(make("gpipe", line(1, 1, 2))) == "rank 0 | F0    B0+   F1:0  B1:0+"
    assert render(make("2bw", line(1, 1, 2))) == "rank 0 | F0@0    B0@0+   F1:0@0  B1:0@0+"


def test_a_timeline_is_drawn_to_scale():
    i = make("gpipe", line(2, 1)).rows[0]
    drawn = Timeline("measured", 2, (Span(0, i[0], 5.0, 6.0), Span(0, i[1], 7.0, 9.0), Span(1, i[0], 6.0, 7.0)))
    assert render_timeline(drawn, 8) == (
        "rank 0 |FF  BBBB|  75% busy\nrank 1 |  FF    |  25% busy\n       0     4 s\nmeasured; bubble 50.0%"
    )


def test_a_timeline_without_spans_is_drawn():
    assert render_timeline(Timeline("measured", 1, ()), 4).splitlines()[0] == "rank 0 |    |   0% busy"


def test_a_grid_shows_computations_only_and_marks_steps():
    schedule = make("gpipe", ScheduleSpec(((0, 1),), 1))  # the second replica has no microbatch
    assert render(schedule) == "rank 0 | F0  B0+\nrank 1 |"

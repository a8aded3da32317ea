"""Properties of every registered schedule, and those of each."""

from collections import defaultdict, deque
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from support.layouts import cases, dealt, replicated

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import COMPUTE, COPIES, Schedule, ScheduleSpec, StageEdges
from autopipe.schedules import REGISTRY, Costs, lower, make, simulate, to_csv, validate
from autopipe.schedules.custom import layout_of
from autopipe.schedules.kind import line
from autopipe.schedules.registry import register

SINGLE = [name for name in REGISTRY if name != "custom"]


@given(cases())
@settings(max_examples=300, deadline=None)
def test_every_schedule_keeps_the_rules_and_finishes(case):
    kind, request, traffic = case
    schedule = make(kind.name, request)
    validate(schedule)
    lowered = lower(schedule, traffic)
    validate(lowered)
    assert simulate(lowered, Costs.uniform(request.num_stages)).seconds > 0
    assert (not kind.synchronous) or not any(schedule.staleness)
    assert {i.op for row in schedule.rows for i in row} <= {*COMPUTE, "R", "S", *(COPIES if kind.spills else ())}
    assert any(i.op == "I" for row in schedule.rows for i in row) == kind.splits_backward


@given(cases())
@settings(max_examples=100, deadline=None)
def test_consecutive_windows_equal_one_long_run(case):
    """The positions of windows change neither the version nor the rank of any F, B, I or W."""
    kind, request, _ = case

    def work(schedule: Schedule) -> set[tuple[int, str]]:
        return {(rank, str(i)) for rank, row in enumerate(schedule.rows) for i in row if i.op in COMPUTE}

    pieces: set[tuple[int, str]] = set()
    for t in range(request.num_minibatches):
        start = request.first_minibatch + t
        pieces |= work(make(kind.name, replace(request, first_minibatch=start, num_minibatches=1)))
    assert pieces == work(make(kind.name, request))


@pytest.mark.parametrize("name", REGISTRY)
def test_every_schedule_has_its_registered_name_and_a_source(name):
    kind = REGISTRY[name]
    assert kind.name == name == make(name, kind.example).name
    assert kind.description and kind.source


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("p", range(1, 9))
def test_every_schedule_runs_for_p_and_m_up_to_8(name, p):
    for m in range(1, 9):
        if name == "2bw" and m < p - 1:
            continue
        request = line(p, m, 2)
        schedule = make(name, replace(request, stage_ranks=((0,),) * p) if REGISTRY[name].spills else request)
        validate(schedule)
        simulate(schedule, Costs.uniform(p))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "pipedream", "2bw"])
@pytest.mark.parametrize("counts", [(3,), (2, 1), (1, 2), (2, 2), (3, 1), (2, 1, 1), (1, 3, 2), (2, 3, 4), (4, 3, 1)])
def test_every_schedule_finishes_with_any_numbers_of_replicas(name, counts):
    for m in (1, 3, 4, 9):
        if name == "2bw" and m < sum(counts):
            continue
        schedule = make(name, ScheduleSpec(replicated(*counts), m, 4, first_minibatch=1))
        validate(schedule)
        validate(lower(schedule, StageEdges.chain(len(counts))))


def test_one_stage_with_replicas_is_data_parallelism():
    schedule = make("1f1b", ScheduleSpec(replicated(2), 3))
    texts = [" ".join(str(i) for i in row) for row in schedule.rows]
    assert texts == ["0F0@0 0B0@0 0F2@0 0B2@0 0R 0S@0", "0F1@0 0B1@0 0R 0S@0"]


@pytest.mark.parametrize("p", range(2, 9))
def test_zb_h1_has_a_third_of_the_bubble_of_1f1b(p):
    thirds = Costs.uniform(p, forward=1.0, backward=1.0)
    whole = Costs.uniform(p, forward=1.0, backward=2.0)
    for m in (p, p + 1, 2 * p, 16):
        split = simulate(make("zero-bubble", line(p, m)), thirds).seconds - 3 * m
        plain = simulate(make("1f1b", line(p, m)), whole).seconds - 3 * m
        assert (split, plain) == (p - 1, 3 * (p - 1))


def held_at_most(schedule: Schedule) -> list[int]:
    """Return the most microbatches that each rank holds, over all its stages."""
    peaks = []
    for row in schedule.rows:
        in_flight = [0]
        for i in row:
            in_flight.append(in_flight[-1] + {"F": 1, "B": -1, "W": -1}.get(i.op, 0))
        peaks.append(max(in_flight))
    return peaks


@pytest.mark.parametrize("p", range(2, 7))
def test_zb_h1_holds_as_much_on_every_rank_as_1f1b_on_the_first(p):
    assert held_at_most(make("zero-bubble", line(p, 8))) == [p] * p
    assert make("zero-bubble", line(p, 8)).in_flight == (p,) * p
    assert held_at_most(make("1f1b", line(p, 8))) == list(range(p, 0, -1))


def test_a_schedule_without_flush_has_no_bubble_between_minibatches():
    for name, m in (("2bw", 4), ("pipedream", 4), ("pipedream", 1)):
        short, long = (simulate(make(name, line(4, m, t)), Costs.uniform(4)).seconds for t in (8, 16))
        assert long - short == 8 * 2 * m


def test_staleness_is_the_warm_up_in_minibatches_rounded_up():
    assert make("pipedream", line(4, 1)).staleness == (3, 2, 1, 0)
    assert make("pipedream", line(4, 2)).staleness == (2, 1, 1, 0)
    assert make("pipedream", line(4, 8)).staleness == (1, 1, 1, 0)
    assert make("pipedream", line(4, 1, vertical_sync=1)).staleness == (3, 3, 3, 3)
    assert make("pipedream", line(4, 1, depth=2)).staleness == (6, 4, 2, 0)
    # 3-1: one microbatch ahead on each of three replicas
    assert make("pipedream", ScheduleSpec(replicated(3, 1), 2)).staleness == (2, 0)
    assert make("2bw", line(4, 3)).staleness == (1, 1, 1, 1)


def test_2bw_uses_the_version_of_the_paper():
    """Microbatch k, counted from 1, uses version max(floor((k - 1) / m) - 1, 0)."""
    m = 3
    for row in make("2bw", line(4, m, 5)).rows:
        for i in row:
            if i.op in COMPUTE:
                k = i.minibatch * m + i.microbatch + 1
                assert i.weight_version == max((k - 1) // m - 1, 0)


def finishes_when_every_step_is_a_meeting_of_all_ranks(schedule: Schedule) -> bool:
    """Run the rows with queues as channels.

    The first S of a rank waits for R of the replicas of all its stages, and until all ranks are at that step.
    """
    replicas = [len(ranks) for ranks in schedule.request.stage_ranks]
    queues: defaultdict[tuple[int, ...], deque[tuple[int, int]]] = defaultdict(deque)
    meetings: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
    left = [deque(row) for row in schedule.rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(left):
            while row:
                i = row[0]
                if i.op in ("SF", "SB"):
                    to = schedule.request.rank_of(i.peer, i.minibatch, i.microbatch)
                    queues[i.stage, i.peer, rank, to].append((i.minibatch, i.microbatch))
                elif i.op in ("RF", "RB"):
                    queue = queues[i.peer, i.stage, schedule.request.rank_of(i.peer, i.minibatch, i.microbatch), rank]
                    if not queue:
                        break
                    assert queue.popleft() == (i.minibatch, i.microbatch)
                elif i.op == "R":
                    meetings[i.minibatch, i.stage].add(rank)
                elif i.op == "S":
                    meetings[i.minibatch,].add(rank)
                    own = [stage for stage, ranks in enumerate(schedule.request.stage_ranks) if rank in ranks]
                    reduced = all(len(meetings[i.minibatch, s]) == replicas[s] for s in own if replicas[s] > 1)
                    if not reduced or len(meetings[i.minibatch,]) < schedule.request.num_ranks:
                        break
                row.popleft()
                moved = True
    return not any(left)


@given(cases())
@settings(max_examples=200, deadline=None)
def test_every_schedule_finishes_if_stages_synchronize_at_every_step(case):
    """Clipping needs the gradients of all stages: a rank waits in a step for the slowest."""
    kind, request, traffic = case
    assume(not kind.spills or request.options["late"])  # otherwise nothing is agreed over stages
    assert finishes_when_every_step_is_a_meeting_of_all_ranks(lower(make(kind.name, request), traffic))


@pytest.mark.parametrize(("name", "counts", "m"), [("2bw", (4, 3, 1, 3, 1), 9), ("pipedream", (2, 3, 1, 4, 1), 9)])
def test_a_late_step_delays_no_other_stage(name, counts, m):
    """Stage 1 would delay its step behind a forward, unless it considers what stage 0 has sent ahead."""
    schedule = lower(
        make(name, ScheduleSpec(replicated(*counts), max(m, sum(counts)), 5)), StageEdges.chain(len(counts))
    )
    assert finishes_when_every_step_is_a_meeting_of_all_ranks(schedule)


def texts(schedule: Schedule, rank: int) -> list[str]:
    return [str(i) for i in schedule.rows[rank]]


def test_2bw_steps_as_late_as_possible_with_replicas():
    """W(1) is first needed by minibatch 2, and the gradients of minibatch 1 are summed only after that step."""
    schedule = make("2bw", ScheduleSpec(replicated(2, 1), 4, 3))
    row = texts(schedule, 0)
    assert row[row.index("0R") : row.index("0S@0") + 2] == ["0R", "0F1:2@0", "0B1:0@0", "0S@0", "0F2:0@1"]
    row = texts(schedule, 2)  # the last stage still has a backward of minibatch 1, in which its gradients start
    assert row[row.index("1S@0") - 1 :][:4] == ["1F1:3@0", "1S@0", "1B1:3@0", "1R1"]
    assert row.index("1S@0") - row.index("1R") == 8


def test_without_replicas_2bw_steps_immediately():
    assert " ".join(texts(make("2bw", line(2, 4, 2)), 0)).count("0B3@0 0S@0") == 1


def test_with_different_staleness_only_replicas_wait_for_one_forward():
    schedule = make("pipedream", ScheduleSpec(replicated(2, 1), 4, 3))
    assert schedule.staleness == (1, 0)
    row = texts(schedule, 0)
    assert row[row.index("0R") :][:4] == ["0R", "0F1:2@0", "0S@0", "0B1:0@0"]
    assert not any("R" in text for text in texts(schedule, 2))


def test_2bw_names_the_number_of_microbatches_that_it_needs():
    with pytest.raises(ScheduleError) as caught:
        make("2bw", line(4, 2))
    assert "the warm-up of stage 0 is 3 microbatches, and a minibatch has 2 microbatches" in caught.value.what
    assert caught.value.remedy == "--num-microbatches 3 or more, or --schedule pipedream"
    make("2bw", line(4, 3))


def test_1f1b_holds_p_minus_s_microbatches_and_eager_1f1b_nearly_twice():
    assert make("1f1b", line(4, 8)).in_flight == (4, 3, 2, 1)
    assert make("eager-1f1b", line(4, 8)).in_flight == (7, 5, 3, 1)
    assert make("eager-1f1b", line(4, 8, depth=1)).rows == make("1f1b", line(4, 8)).rows
    assert make("gpipe", line(4, 8)).in_flight == (8, 8, 8, 8)


def test_an_unknown_schedule_is_refused_with_the_known_ones_and_the_nearest():
    with pytest.raises(ScheduleError, match=r"unknown schedule '1fb1'; known: 1f1b, 2bw, .* Did you mean '1f1b'\?"):
        make("1fb1", line(2, 2))


@pytest.mark.parametrize(
    ("name", "request_", "what"),
    [
        ("1f1b", line(2, 2, depth=2), "1f1b takes no option 'depth'"),
        ("pipedream", line(2, 2, vertical=1), "unknown option 'vertical'; known: depth, vertical_sync."),
        ("pipedream", line(2, 2, vertical_sync=2), "vertical_sync must be from 0 to 1, and is 2"),
        ("1f1b", dealt(2, 2, 4), "1f1b runs one stage per rank; rank 0 has stages 0 and 2"),
        ("interleaved", dealt(2, 2, 5), "5 microbatches on 2 ranks do not divide into 2 rounds"),
        ("interleaved", ScheduleSpec(((0,), (0,), (1,), (1,)), 4), "deals 4 stages out to 2 ranks in turn"),
        ("interleaved", ScheduleSpec(replicated(2, 1), 4), "deals 2 stages out to 3 ranks in turn"),
        ("interleaved", ScheduleSpec(((0, 1), (1, 0)), 4), "the same number to each, each in groups of equally many"),
        ("interleaved", dealt(2, 2, 10, d=2), "a pipeline of 2 ranks runs 5, do not divide into 2 rounds"),
        (
            "zero-bubble",
            replace(dealt(2, 2, 8, d=2), options={"stages_per_rank": 1}),
            "4 stages on 2 groups of 2 ranks",
        ),
        ("interleaved", replace(dealt(2, 2, 4), options={"stages_per_rank": 3}), "4 stages on 2 ranks are 2 per rank"),
        ("gpipe", line(2, 0), "gpipe needs at least one of the microbatches, got 0"),
        ("gpipe", line(2, 2, 0), "gpipe needs at least one of the minibatches, got 0"),
        ("gpipe", ScheduleSpec(((0,), (1,)), 2, first_minibatch=-1), "minibatch must be at least 0, and is -1"),
        ("gpipe", ScheduleSpec(((0,), (2,)), 2), "rank 1 has no stage"),
        ("gpipe", ScheduleSpec(((0,), ()), 2), "a stage needs at least one rank, and each of its ranks once"),
        ("gpipe", ScheduleSpec(((0, 0),), 2), "a stage needs at least one rank, and each of its ranks once"),
    ],
)
def test_an_impossible_request_is_refused_with_the_numbers(name, request_, what):
    with pytest.raises(ScheduleError) as caught:
        make(name, request_)
    assert what in caught.value.what


def test_a_custom_schedule_is_run_as_written():
    text = "# two ranks\n0F0, 0F1,, 0B0, 0B1\n1F0,1B0,1F1,1B1 # the last one\n\n"
    schedule = make("custom", ScheduleSpec(((0,), (1,)), 2, 2, text=text))
    assert [str(i) for i in schedule.rows[1]][:5] == ["1F0@0", "1B0@0", "1F1@0", "1B1@0", "1S@0"]
    assert to_csv(schedule) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_replicas_of_a_custom_schedule_take_turns():
    base = make("1f1b", ScheduleSpec(replicated(2, 1), 3, 3))
    assert make("custom", ScheduleSpec(replicated(2, 1), 3, 3, text=to_csv(base))).rows == base.rows


@pytest.mark.parametrize(
    ("stage_ranks", "text", "what"),
    [
        (((0,), (1,)), "F0,B0\n", "1 rows for 2 ranks"),
        (((0,), (1,)), "F0,B0\nX0,B0\n", "'X0' is not a cell of a schedule"),
        (((0,),), "F0,0SEND_F0,B0\n", "'0SEND_F0' is not a cell"),
        (((0,), (0,)), "F0,1F0,1B0,0B0\n", "'F0' is not a cell"),
        (((0,), (1,)), "F0,B0\nB0,F0\n", "[backward-after-forward] custom: 1B0@0 comes before its F"),
        (
            ((0,), (1,)),
            "0F0,0B0\n1F0,1B0,1I0\n",
            "[once] custom: 1I0@0: the backward of this microbatch has",
        ),
        (((0, 1), (0, 1)), "0F0,1F0,1B0,0B0\n,\n", "the grid would change from minibatch to minibatch"),
    ],
)
def test_a_wrong_custom_schedule_is_refused(stage_ranks, text, what):
    with pytest.raises(ScheduleError) as caught:
        make("custom", ScheduleSpec(stage_ranks, 1, 2, text=text))
    assert what in str(caught.value)


def test_the_layout_of_a_grid_is_read_from_its_cells():
    assert layout_of("F0,F1,B0,B1\nF0,B0,F1,B1\n") == (((0,), (1,)), 2)
    assert layout_of("0F0,2F0,2B0,0B0\n1F0,1B0\n") == (((0,), (1,), (0,)), 1)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("0F0,0B0\n2F0,2B0\n", "lacks stage 1 of 0 to 2"),
        ("0F1,0B1\n", "lacks microbatch 0 of 0 to 1"),
        (",\n", "has no cells"),
    ],
)
def test_a_grid_with_gaps_is_refused(text, what):
    with pytest.raises(ScheduleError, match=f"the custom schedule {what}") as caught:
        layout_of(text)
    assert "from 0 without gaps" in caught.value.remedy


def test_a_name_is_registered_once():
    with pytest.raises(ScheduleError, match="a schedule 'gpipe' is already registered"):
        register(REGISTRY["gpipe"])


def test_auto_never_chooses_a_schedule_with_stale_gradients():
    assert not any(kind.tried_by_auto for kind in REGISTRY.values() if not kind.synchronous)
    with pytest.raises(ValueError, match="schedule '2bw' has stale gradients, so --schedule auto must not choose it"):
        replace(REGISTRY["2bw"], tried_by_auto=True)


def test_a_schedule_that_overlaps_minibatches_has_no_grid():
    with pytest.raises(ScheduleError, match="2bw overlaps minibatches"):
        to_csv(make("2bw", line(2, 2)))

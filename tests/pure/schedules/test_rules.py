"""A schedule with one injected mistake breaks the rule for it, and correct schedules break no rule."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import Instruction, Op, Schedule, ScheduleSpec, StageEdges
from autopipe.schedules import lower, make, validate
from autopipe.schedules.kind import line
from autopipe.schedules.validate import RULES

FLUSH = make("1f1b", line(2, 3))  # 0F0 0F1 0B0 0F2 0B1 0B2 0S | 1F0 1B0 1F1 1B1 1F2 1B2 1S
TWICE = make("gpipe", line(2, 2, 2))
LOWERED = lower(FLUSH, StageEdges.chain(2))
REPLICAS = make("1f1b", ScheduleSpec(((0, 1), (2,)), 4))
HALVES = make("zero-bubble", line(2, 3))
LOOPED = make("interleaved", ScheduleSpec(((0,), (1,), (0,), (1,)), 2))
STALE = make("2bw", line(2, 2, 3))
LONG = make("2bw", line(2, 2, 4))
# ... 1R 1F1:0 1B1:0 1F1:1 ... 1F1:3 1S 1B1:3 1R1 1F2:0
OVERLAPPED = make("2bw", ScheduleSpec(((0, 1), (2,)), 4, 3))

# 0L 1L 0F0 0F1 0U 2L 1F0 ... with the messages of each microbatch
SPILLED = make("spilled", ScheduleSpec(((0,), (0,), (0,)), 2, options={"messages_on_host": 1}))


def rows(schedule: Schedule, rank: int, change: Callable[[list[Instruction]], None]) -> Schedule:
    row = list(schedule.rows[rank])
    change(row)
    return replace(schedule, rows=(*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :]))


def at(schedule: Schedule, rank: int, text: str) -> int:
    return [str(i) for i in schedule.rows[rank]].index(text)


def moved(schedule: Schedule, rank: int, text: str, before: str) -> Schedule:
    def change(row: list[Instruction]) -> None:
        i = row.pop(at(schedule, rank, text))
        row.insert([str(other) for other in row].index(before), i)

    return rows(schedule, rank, change)


def dropped(schedule: Schedule, rank: int, text: str) -> Schedule:
    return rows(schedule, rank, lambda row: row.pop(at(schedule, rank, text)))


def doubled(schedule: Schedule, rank: int, text: str) -> Schedule:
    place = at(schedule, rank, text)
    return rows(schedule, rank, lambda row: row.insert(place, row[place]))


def changed(schedule: Schedule, rank: int, text: str, **values: int) -> Schedule:
    place = at(schedule, rank, text)
    return rows(schedule, rank, lambda row: row.__setitem__(place, replace(row[place], **values)))


def swapped_rows(schedule: Schedule) -> Schedule:
    return replace(schedule, rows=(schedule.rows[1], schedule.rows[0], *schedule.rows[2:]))


def inserted(schedule: Schedule, rank: int, before: str, **values: object) -> Schedule:
    """Insert a copy of the instruction in front of another, with other fields."""
    place = at(schedule, rank, before)
    return rows(schedule, rank, lambda row: row.insert(place, replace(row[place - 1], **values)))


def backwards_out_of_order() -> Schedule:
    schedule = make("gpipe", line(2, 2))
    return moved(schedule, 1, "1B1@0", "1B0@0")


def sends_out_of_order() -> Schedule:
    schedule = lower(make("gpipe", line(2, 2)), StageEdges.chain(2))
    schedule = moved(schedule, 0, "0SF0>1", "0B0@0")
    return moved(schedule, 0, "0SF0>1", "0RB0<1")


def stuck() -> Schedule:
    """Return rows in which each rank is right, but which deadlock: rank 0 waits for B0 before it sends F1."""
    schedule = make("gpipe", line(2, 2))
    return moved(schedule, 0, "0B0@0", "0F1@0")


BROKEN = [
    ("placement", swapped_rows(FLUSH), "rank 0, which runs stages [0]"),
    ("placement", swapped_rows(REPLICAS), "belongs on rank"),
    ("placement", changed(FLUSH, 0, "0F2@0", microbatch=3), "microbatch 3 of 3"),
    ("placement", changed(FLUSH, 0, "0F2@0", minibatch=1), "minibatch 1 is outside 0..0"),
    ("placement", changed(LOWERED, 0, "0SF0>1", peer=2), "stage 2 does not exist"),
    ("placement", replace(FLUSH, rows=FLUSH.rows[:1]), "1 rows"),
    ("once", dropped(dropped(FLUSH, 0, "0B2@0"), 0, "0S@0"), "lacks 1 backwards"),
    ("once", doubled(FLUSH, 1, "1F1@0"), "1F1@0 appears twice"),
    ("once", doubled(FLUSH, 1, "1B1@0"), "1B1@0 appears twice"),
    ("once", changed(HALVES, 0, "0W1@0", op=Op.BACKWARD), "has already run"),
    (
        "once",
        inserted(FLUSH, 1, "1S@0", op=Op.BACKWARD_INPUTS),
        "1I2@0: the backward of this microbatch has already run",
    ),
    ("once", dropped(dropped(HALVES, 1, "1W1@0"), 1, "1S@0"), "lacks 1 backwards"),
    ("stages-in-order", moved(LOOPED, 0, "2F0@0", "0F0@0"), "which needs it"),
    ("stages-in-order", moved(LOOPED, 1, "1B0@0", "3B0@0"), "which needs it"),
    ("backward-after-forward", moved(FLUSH, 1, "1B1@0", "1F1@0"), "comes before its F"),
    ("backward-after-forward", moved(HALVES, 0, "0W0@0", "0I0@0"), "comes before its I"),
    ("same-version", changed(FLUSH, 0, "0B1@0", weight_version=1), "its forward ran at version 0"),
    ("staleness", changed(STALE, 0, "0F2:0@1", weight_version=0), "should run at version 1"),
    ("version-exists", moved(TWICE, 0, "0S@0", "0B1:0@1"), "the newest version is 0"),
    ("version-kept", changed(LONG, 0, "0F3:0@2", weight_version=0), "version 0 has been dropped; the newest is 2"),
    ("microbatch-order", backwards_out_of_order(), "comes after microbatch (0, 1)"),
    ("in-flight", moved(FLUSH, 0, "0F2@0", "0B0@0"), "makes 3 microbatches in flight; the bound is 2"),
    ("step-once", dropped(FLUSH, 1, "1S@0"), "stage 1 has no step for minibatch 0"),
    ("step-once", doubled(FLUSH, 1, "1S@0"), "the next step of stage 1 must be of minibatch and version 1"),
    ("step-once", changed(FLUSH, 1, "1S@0", weight_version=1), "step of stage 1 must be of minibatch and version 0"),
    ("step-once", doubled(REPLICAS, 0, "0R"), "the next reduction of stage 0 must be of minibatch 1"),
    ("step-once", moved(OVERLAPPED, 2, "1S@0", "1F2:0@1"), "after step 0, the next reduction of stage 1"),
    ("step-after-backward", moved(FLUSH, 1, "1S@0", "1B2@0"), "comes before 1 backwards of its minibatch"),
    ("gradients-apart", moved(STALE, 0, "0B1:0@0", "0S@0"), "comes before the step of minibatch 0"),
    ("gradients-apart", moved(OVERLAPPED, 2, "1R", "1F1:1@0"), "1B1:0@0 comes before the step of minibatch 0"),
    ("reduce-before-step", moved(REPLICAS, 0, "0S@0", "0R"), "comes before the reduction"),
    ("reduce-before-step", moved(REPLICAS, 0, "0R", "0B2@0"), "comes before 1 backwards of its minibatch"),
    ("message-place", moved(LOWERED, 0, "0SF0>1", "0F0@0"), "comes before the F"),
    ("message-place", moved(LOWERED, 1, "1F0@0", "1RF0<0"), "comes after the F"),
    ("channel-order", sends_out_of_order(), "it sends 0SF1>1 but receives 1RF0<0"),
    ("channel-order", dropped(LOWERED, 1, "1RF2<0"), "it sends 3 messages but receives 2"),
    ("channel-order", dropped(LOWERED, 0, "0SF2>1"), "it sends 2 messages but receives 3"),
    ("step-after-backward", dropped(FLUSH, 0, "0B2@0"), "comes before 1 backwards of its minibatch"),
    ("resident", dropped(SPILLED, 0, "1L"), "stage 1 is not on the device"),
    ("resident", doubled(SPILLED, 0, "1L"), "stage 1 is on the device already"),
    ("resident", dropped(SPILLED, 0, "2O"), "the optimizer state of stage 2 is not on the device"),
    ("two-slabs", moved(SPILLED, 0, "2L", "0U"), "there is room for 2"),
    ("messages-there", dropped(SPILLED, 0, "1L1"), "the messages of this microbatch are not on the device"),
    ("messages-there", doubled(SPILLED, 0, "1U1"), "the messages of this microbatch are on the host already"),
    ("no-deadlock", stuck(), "deadlock: 2 of 2 ranks are blocked: rank 0 at 0RB0<1, rank 1 at 1RF1<0"),
]


@pytest.mark.parametrize(("rule", "schedule", "text"), BROKEN)
def test_an_injected_mistake_breaks_its_rule(rule, schedule, text):
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    assert caught.value.rule == rule
    assert text in str(caught.value)


def test_every_rule_has_a_mistake_that_breaks_it():
    assert {rule for rule, _, _ in BROKEN} == set(RULES)


@pytest.mark.parametrize("schedule", [FLUSH, TWICE, LOWERED, REPLICAS, HALVES, LOOPED, STALE, LONG, OVERLAPPED])
def test_the_schedules_without_mistakes_break_no_rule(schedule):
    validate(schedule)


def test_stages_of_one_rank_may_run_different_microbatches():
    crossed = ScheduleSpec(((0, 1), (1, 0)), 2, text="0F0,1F1,1B1,0B0\n0F1,1F0,1B0,0B1\n")
    row = " ".join(str(i) for i in make("custom", crossed).rows[1])
    assert row.startswith("0F1@0 1F0@0 1B0@0 1R 0B1@0 0R ")


def test_the_error_shows_the_grid_with_the_cell_marked():
    with pytest.raises(ScheduleError) as caught:
        validate(moved(FLUSH, 1, "1B1@0", "1F1@0"))
    assert str(caught.value) == (
        "[backward-after-forward] 1f1b: 1B1@0 comes before its F\n"
        "  at:  rank 1, instruction 2\n"
        "\n"
        "rank 0 | 0F0@0   0F1@0   0B0@0   0F2@0   0B1@0   0B2@0   0S@0\n"
        "rank 1 | 1F0@0   1B0@0   >1B1@0< 1F1@0   1F2@0   1B2@0   1S@0"
    )


def test_a_long_grid_is_shortened_around_the_mark():
    schedule = make("gpipe", line(30, 40))
    with pytest.raises(ScheduleError) as caught:
        validate(changed(schedule, 20, "20F30@0", weight_version=1))
    lines = caught.value.grid.splitlines()
    assert [text[:7] for text in lines] == [f"rank {rank}" for rank in range(12, 29)]
    assert lines[8].startswith("rank 20 | ...") and ">20F30@1<" in lines[8] and lines[8].endswith("...")

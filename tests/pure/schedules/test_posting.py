"""Receives are posted ahead of their turn, in the order of the sends, and only if their message is sent."""

from collections.abc import Collection
from dataclasses import replace

import pytest

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import COMPUTE, RECEIVES, SENDS, Op, Schedule, ScheduleSpec, StageEdges
from autopipe.schedules import lower, make
from autopipe.schedules.kind import line
from autopipe.schedules.lower import LOOKAHEAD, posts, turns

LINE = lower(make("1f1b", line(3, 4)), StageEdges.chain(3))
LOOPED = lower(make("interleaved", ScheduleSpec(((0,), (1,), (0,), (1,)), 2)), StageEdges.chain(4))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_receive_is_posted_a_few_compute_instructions_ahead(rank: int) -> None:
    row = LINE.rows[rank]
    schedule = turns(LINE, rank)
    assert [turn.instruction for turn in schedule] == list(row)
    posted = {i: index for index, turn in enumerate(schedule) for i in turn.posts}
    assert set(posted) == {i for i in row if i.op in RECEIVES}
    for i, index in posted.items():
        needed = row.index(i)
        before = sum(other.op in COMPUTE for other in row[:needed])
        assert sum(other.op in COMPUTE for other in row[index:needed]) == min(before, LOOKAHEAD)


def test_the_posts_of_some_ranks_are_those_of_all_ranks() -> None:
    everything = posts(LOOPED, (0, 1))
    assert [posts(LOOPED, (rank,)) for rank in (0, 1)] == [{0: everything[0]}, {1: everything[1]}]
    assert sum(map(len, everything[1].values())) == sum(i.op in RECEIVES for i in LOOPED.rows[1])


def without_first(ops: Collection[Op], schedule: Schedule, rank: int) -> Schedule:
    row = list(schedule.rows[rank])
    row.remove(next(i for i in row if i.op in ops))
    return replace(schedule, rows=(*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :]))


def test_a_receive_without_its_send_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"rank 1 waits for .*, but rank 0 never sends it"):
        posts(without_first(SENDS, LOOPED, 0), (1,))


def test_a_send_without_its_receive_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"rank 1 waits for .*, but rank 0 sends a message before it that is never"):
        posts(without_first(RECEIVES, LOOPED, 1), (1,))

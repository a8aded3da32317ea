"""The steps that the executor runs, compared with the instructions of their rows."""

from __future__ import annotations

import pytest

from autopipe.ir.messages import ACTIVATION, GRADIENT, Channel
from autopipe.ir.schedule import RECEIVES, SENDS, Op, ScheduleSpec, StageEdges
from autopipe.runtime.program import Step
from autopipe.schedules import Turn, lower, make, turns


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "2bw", "pipedream"])
@pytest.mark.parametrize("offset", [0, 6])
def test_a_step_later_is_the_same_instruction_of_a_later_window(schedule: str, offset: int) -> None:
    spec = ScheduleSpec(((0, 1), (2,), (3,)), 4, 2)
    later = ScheduleSpec(spec.stage_ranks, 4, 2, first_minibatch=offset)
    edges = StageEdges.chain(3)
    for rank in range(4):
        rows = [turns(lower(make(schedule, request), edges), rank) for request in (spec, later)]
        for turn, expected in zip(*rows, strict=True):
            step = Step.of(turn, spec, rank, {}, frozenset())
            assert step.text(offset) == str(step.at(offset))
            assert [post.at(offset) for post in step.posts] == list(expected.posts)
            if schedule in ("1f1b", "gpipe"):
                assert step.at(offset) == expected.instruction


def test_the_channel_of_a_message_joins_the_ranks_that_run_it() -> None:
    spec = ScheduleSpec(((0, 1), (2,)), 4)
    for rank, row in enumerate(lower(make("1f1b", spec), StageEdges.chain(2)).rows):
        for i in row:
            step = Step.of(Turn(i, ()), spec, rank, {}, frozenset())
            if i.op not in (*SENDS, *RECEIVES):
                assert step.channel is None
                continue
            replica = i.microbatch % 2
            forward = i.op in (Op.SEND_FORWARD, Op.RECEIVE_FORWARD)
            assert step.channel == (
                Channel(ACTIVATION, 0, 1, replica, 2) if forward else Channel(GRADIENT, 1, 0, 2, replica)
            )

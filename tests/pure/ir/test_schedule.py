"""Instructions: their text, and their operation."""

from __future__ import annotations

import pytest

from autopipe.ir.schedule import Instruction, Op, ScheduleSpec


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        (Instruction(Op.FORWARD, 1, 0, 2, 0), "1F2@0"),
        (Instruction(Op.BACKWARD, 1, 3, 2, 1), "1B3:2@1"),
        (Instruction(Op.SEND_FORWARD, 0, 0, 1, peer=1), "0SF1>1"),
        (Instruction(Op.RECEIVE_BACKWARD, 0, 2, 1, peer=1), "0RB2:1<1"),
        (Instruction(Op.REDUCE, 0, 2), "0R2"),
    ],
)
def test_an_instruction_has_a_short_text(instruction: Instruction, text: str) -> None:
    assert str(instruction) == text


def test_an_operation_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="'F' is not an Op"):
        Instruction("F", 0, 0)  # type: ignore[arg-type]


def test_replicas_take_microbatches_in_turn() -> None:
    spec = ScheduleSpec(((0, 1), (2,)), 3)
    assert [spec.rank_of(0, minibatch, j) for minibatch in (0, 1) for j in range(3)] == [0, 1, 0, 1, 0, 1]
    assert (spec.num_stages, spec.num_ranks) == (2, 3)

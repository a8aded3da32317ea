"""Every error class states what, where and what to try."""

from __future__ import annotations

import pytest

from autopipe import errors
from autopipe.errors import (
    AutopipeError,
    InternalError,
    RunError,
    ScheduleError,
    WorkerError,
    counted,
    unknown_choice,
    with_article,
)

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, AutopipeError)]
RAISED = [c for c in CLASSES if c is not AutopipeError]


@pytest.mark.parametrize("kind", [c for c in RAISED if c is not WorkerError])
def test_the_text_holds_what_where_and_what_to_try(kind: type[AutopipeError]) -> None:
    error = kind("it broke", where="model.py:3", remedy="mend it")
    assert str(error).splitlines() == ["it broke", "  at:  model.py:3", "  try: mend it"]
    assert error.exit_code == 1


def test_a_worker_error_names_rank_stage_and_instruction() -> None:
    error = WorkerError("ValueError: boom", rank=1, stage=2, instruction="2F3@0", where="model.py:7")
    assert "at:  rank 1, stage 2, instruction 2F3@0; model.py:7" in str(error)
    assert error.exit_code == 3


def test_a_schedule_error_shows_its_rule_and_its_grid() -> None:
    text = str(ScheduleError("B before F", rule="backward-after-forward", grid="0 | >B0<"))
    assert text.startswith("[backward-after-forward] B before F")
    assert text.endswith("0 | >B0<")


def test_an_error_without_a_text_is_an_internal_error() -> None:
    with pytest.raises(ValueError, match="must say what happened"):
        RunError(" ")


def test_the_base_error_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        AutopipeError("it broke")


def test_an_internal_error_asks_for_a_report() -> None:
    assert "report it" in str(InternalError("weight version 3 is not stored"))


def test_the_tree_is_drawn_in_the_docstring() -> None:
    for kind in CLASSES:
        assert kind.__name__ in (errors.__doc__ or "")


def test_an_unknown_choice_is_refused_with_the_nearest() -> None:
    assert unknown_choice("schedule", "1f1", ["gpipe", "1f1b"]) == (
        "unknown schedule '1f1'; known: 1f1b, gpipe. Did you mean '1f1b'?"
    )


def test_a_number_is_written_with_its_noun() -> None:
    assert [counted(number, "stage") for number in (0, 1, 2)] == ["0 stages", "1 stage", "2 stages"]
    assert counted(2, "batch") == "2 batches"


def test_a_type_is_written_with_its_article() -> None:
    names = ["int", "Tensor", "LBFGS", "list", "AdamW", "NoneType", "SGD", "UNet"]
    assert [with_article(name) for name in names] == [
        "an int", "a Tensor", "an LBFGS", "a list", "an AdamW", "a NoneType", "an SGD", "a UNet",
    ]  # fmt: skip

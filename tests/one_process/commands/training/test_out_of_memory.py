"""Out of memory: the errors that mean it, the report, and the plan that would fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.pipelines import captured
from support.schedule_cases import Case

from autopipe.commands.training import attempts
from autopipe.commands.training.attempts import advise, limit_of
from autopipe.errors import WorkerError
from autopipe.launch.rank.out_of_memory import describe_oom, is_out_of_memory, resident_bytes

GIB = 2**30
CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB"
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
)


@dataclass(frozen=True)
class Stage:
    peak_bytes: int
    ranks: tuple[int, ...]
    spilled: bool = False


PLAN: Any = SimpleNamespace(stages=(Stage(3 * GIB, (0, 1)), Stage(GIB, (1,))), rank_of=lambda process: process)


def test_out_of_memory_errors_are_recognised() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError(CUDA))
    assert is_out_of_memory(RuntimeError(CPU))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert describe_oom(ValueError("no"), PLAN, 0, torch.device("cpu"), 0) == {}


@pytest.mark.parametrize(("text", "asked"), [(CUDA, int(2.5 * GIB)), (CPU, 4096), ("out of memory", 0)])
def test_the_requested_bytes_are_read_from_the_error(text: str, asked: int) -> None:
    error = describe_oom(RuntimeError(text), PLAN, 1, torch.device("cpu"), resident_bytes())
    assert error["out_of_memory"]["requested"] == asked
    assert error["out_of_memory"]["predicted"] == 4 * GIB
    assert "the plan predicted 4.00 GiB" in error["message"]
    assert ("tried to allocate" in error["message"]) == bool(asked)


def test_the_next_plan_leaves_the_margin_by_which_the_last_was_too_low() -> None:
    figures = {"predicted": 10 * GIB, "used": 16 * GIB, "requested": 4 * GIB, "available": 18 * GIB}
    assert limit_of(figures) == pytest.approx(0.95 * 9 * GIB)
    assert limit_of({**figures, "used": 0, "requested": 0}) == pytest.approx(0.95 * 18 * GIB)


def test_other_errors_keep_their_remedy() -> None:
    error = WorkerError("boom", rank=0, remedy="look at it")
    advise(error, SimpleNamespace())  # type: ignore[arg-type]  # nothing of it is asked for
    assert error.remedy == "look at it"


def test_the_report_names_the_difference_to_a_plan_that_fits() -> None:
    plan = Case("1f1b", "gpt", (1, 1), "2p").plan(captured("gpt"))
    again = replace(plan, stages=tuple(replace(stage, recompute="stage") for stage in plan.stages))
    assert "2 stages of 2 recompute their forward" in attempts._difference(plan, again)
    assert "other cuts fit" in attempts._difference(plan, plan)

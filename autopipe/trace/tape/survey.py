"""Find the Python numbers of forward and loss that change from step to step: those that can be inputs of the graph.

The first minibatches run on fake tensors, in the order of plain training, in a process that trains nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

from torch import nn

from autopipe.errors import TraceError
from autopipe.ir.graph import Input, Number
from autopipe.trace.numbers import Call, kind_of, spec_of
from autopipe.trace.tape.tape import Tape
from autopipe.workload import Item, Workload
from autopipe.workload.hooks.optimizers import is_of_torch

_MOST_RUNS = 240
"""Microbatches that are run."""
_MOST_SECONDS = 20.0
_MOST_NUMBERS = 64
_LARGEST = 1 << 62


def changing_numbers(workload: Workload, model: nn.Module) -> tuple[tuple[Input, ...], str]:
    """Return the inputs for the numbers that change, and "". If anything else changes, too: () and the reason."""
    if why := _own_steps(workload, model):
        return (), why
    tape = Tape(workload, model)
    first: dict[Any, dict[Call, list[tuple[int, Any]]]] = {}  # form of a batch -> the numbers of its first run
    recorded: dict[Any, int] = {}  # form -> how many inputs there were when a run did something new
    deadline = time.monotonic() + _MOST_SECONDS
    for _, part in zip(range(_MOST_RUNS), _microbatches(workload), strict=False):
        tape.seen = {}
        try:
            difference = tape.run(part, None, {})
        except TraceError as error:
            return (), error.what
        if difference is not None:
            return (), f"more than numbers changes: {difference.now}"
        form = tuple((name, leaf.dtype, leaf.shape) for name, leaf in workload.leaves(part).items())
        before = first.setdefault(form, tape.seen)
        new = _changed(before, tape.seen, tape.numbers)
        if tape.recorded and not new and recorded.get(form) == len(tape.numbers):
            return (), "it makes other calls for some microbatches"
        if tape.recorded:
            recorded[form] = len(tape.numbers)
        tape.numbers += new
        if len(tape.numbers) > _MOST_NUMBERS or time.monotonic() > deadline:
            break
    if len(tape.numbers) > _MOST_NUMBERS:
        return (), f"more than {_MOST_NUMBERS} numbers change"
    return tape.numbers, "" if tape.numbers else "no number in the arguments of a call changes"


def _own_steps(workload: Workload, model: nn.Module) -> str:
    """Return why a step may run code that is not torch's, and could change what a forward reads; "" if it does not."""
    try:
        optimizer = workload.optimizer([*model.named_parameters()])
        scheduler = None if optimizer is None else workload.scheduler(optimizer)
    except Exception as error:
        return f"the optimizer or the scheduler fails without the weights ({type(error).__name__})"
    own = optimizer is not None and not is_of_torch(optimizer, scheduler)
    return "the optimizer or the scheduler is not one of torch's, or calls functions of yours" if own else ""


def _microbatches(workload: Workload) -> Iterator[Item]:
    epoch = 0
    while True:
        for item in workload.items(None, epoch=epoch):
            yield from workload.split(item, 2)
        epoch += 1


def _changed(
    before: dict[Call, list[tuple[int, Any]]], now: dict[Call, list[tuple[int, Any]]], known: tuple[Input, ...]
) -> tuple[Input, ...]:
    """Return inputs for the numbers in which two runs differ."""
    places = {(n.function, n.place, n.call, n.argument) for n in (entry.number for entry in known) if n is not None}
    new: list[Input] = []
    for call, numbers in before.items():
        for (place, value), (other_place, other) in zip(numbers, now.get(call, ()), strict=False):
            kind = kind_of(value)
            if place != other_place or kind != kind_of(other) or repr(value) == repr(other) or (*call, place) in places:
                continue
            if (kind == "float" and not math.isfinite(value)) or (kind == "int" and abs(value) > _LARGEST):
                continue
            hint = repr({"bool": bool, "int": int, "float": float}[kind](value))
            name = f"number_{len(known) + len(new)}"
            new.append(Input(name, spec_of(kind), Number(*call, place, kind, hint)))
    return tuple(new)

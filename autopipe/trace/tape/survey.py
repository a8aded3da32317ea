"""Find what forward and loss do otherwise from step to step: the numbers that change, and how many other calls.

The first minibatches run on fake tensors, in the order of plain training, in a process that trains nothing. Numbers in
calls become inputs of the graph; each other sequence of calls gets stage code of its own.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from autopipe.errors import TraceError
from autopipe.ir.graph import Graph, Input, Number
from autopipe.trace.numbers import Call, kind_of, spec_of
from autopipe.trace.result import Capture
from autopipe.trace.state.observing.reach import roots
from autopipe.trace.state.snapshots.snapshot import Snapshot
from autopipe.trace.tape.tape import Tape
from autopipe.workload import Item, Workload

_MOST_CALLS = 32
"""Other sequences of calls that may come in these microbatches."""
_MOST_RUNS = 240
"""Microbatches that are run."""
_FIRST_RUNS = 4
"""Microbatches that every training has."""
_MOST_SECONDS = 20.0
_MOST_NUMBERS = 64
_LARGEST = 1 << 62


class Survey(NamedTuple):
    """What changes. ``numbers``: as inputs of the graph; None if something changes that cannot, with ``why``.

    ``others``: graphs of other calls that read parameters or buffers which those of the first microbatch do not, those
    that read most of them first.
    """

    numbers: tuple[Input, ...] | None
    why: str = ""
    others: tuple[Graph, ...] = ()


def survey(workload: Workload, model: nn.Module) -> Survey:
    """Run the first minibatches, and return what forward and loss do otherwise in some of them."""
    tape = Tape(workload, model, varies=True)
    if tape.steps is not None and tape.steps.why_not:
        return Survey(None, tape.steps.why_not)
    first: dict[Any, dict[Call, list[tuple[int, Any]]]] = {}  # form of a batch -> the first numbers of its calls
    graphs: dict[Any, list[Graph]] = {}  # form -> its sequences of calls, with the numbers known so far
    every: list[Graph] = []
    deadline = time.monotonic() + _MOST_SECONDS
    for run, (part, is_last) in zip(range(_MOST_RUNS), _microbatches(workload), strict=False):
        form = tuple((name, leaf.dtype, leaf.shape) for name, leaf in workload.leaves(part).items())
        known = graphs.setdefault(form, [])
        tape.seen = {}
        try:
            difference = tape.run(part, {str(i): (graph, {}) for i, graph in enumerate(known)}, _adding(known, every))
            if is_last:
                tape.after_minibatch()
        except TraceError as error:
            return Survey(None, error.what)
        if difference is not None:
            if difference.is_raised and run >= _FIRST_RUNS:
                break  # plain training raises it, too, if it comes so far
            return Survey(None, f"more than numbers changes: {difference.now}")
        before = first.setdefault(form, {})
        for call, numbers in tape.seen.items():
            before.setdefault(call, numbers)
        if new := _changed(before, tape.seen, tape.numbers):
            tape.numbers += new
            tape.forget()
            graphs.clear()
        if sum(len(each) - 1 for each in graphs.values() if each) > _MOST_CALLS:
            return Survey(None, f"it makes more than {_MOST_CALLS} other sequences of calls in {run + 1} microbatches")
        if len(tape.numbers) > _MOST_NUMBERS or time.monotonic() > deadline:
            break
    if len(tape.numbers) > _MOST_NUMBERS:
        return Survey(None, f"more than {_MOST_NUMBERS} numbers change")
    others = [graph for graph in every if not _state(graph) <= _state(every[0])]
    return Survey(tape.numbers, "", tuple(sorted(others, key=lambda graph: -len(_state(graph)))))


def _adding(known: list[Graph], every: list[Graph]) -> Callable[[Capture], str]:
    def add(captured: Capture) -> str:
        known.append(captured.graph)
        every.append(captured.graph)
        return str(len(known) - 1)

    return add


def _state(graph: Graph) -> set[str]:
    return {name for node in graph.nodes for name in (*node.parameters, *node.buffers, *node.buffers_written)}


def _microbatches(workload: Workload) -> Iterator[tuple[Item, bool]]:
    """Yield the halves of the minibatches, each with whether it is the last one."""
    epoch = 0
    while True:
        for item in workload.items(None, epoch=epoch):
            parts = workload.split(item, 2)
            yield from ((part, part is parts[-1]) for part in parts)
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


class Start:
    """The state of model, loss and the user's modules, and of the random generators in it."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        self._snapshot = Snapshot.of(roots(model, workload.functions()), compared=False)
        self._generators = [way for way in map(_way, self._snapshot.owners.values()) if way is not None]

    def restore(self) -> None:
        """Put everything back, but iterators and what libraries keep in C."""
        self._snapshot.restore()
        for put, state in self._generators:
            put(state)


def _way(owner: Any) -> tuple[Callable[[Any], Any], Any] | None:
    """Return what sets the state of a generator, and its state; None for anything else."""
    if isinstance(owner, random.Random):
        return owner.setstate, owner.getstate()
    if isinstance(owner, np.random.Generator):
        return lambda state: setattr(owner.bit_generator, "state", state), owner.bit_generator.state
    if isinstance(owner, np.random.RandomState):
        return owner.set_state, owner.get_state()
    if isinstance(owner, torch.Generator):
        return owner.set_state, owner.get_state()
    return None

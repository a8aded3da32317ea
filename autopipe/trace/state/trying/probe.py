"""Find out by running whether the loss depends on state that changes, where the source does not show who reads it.

A counter of an installed package may be read through a helper object, a local name or a property. Forward and loss run
with other values in its place: the next value, later values, and those that they compare it with. State that only a log
or a progress bar reads does not change the loss, whatever its value is. All runs begin with the same weights, buffers
and random numbers. Runs in a row show what has no later value to try, such as a text or a counter in C.

A run with a later value may change places that no run before it changed: an epoch begins, a phase is entered. Their
later values are tried in the same way, from the state that this run left.
"""

from __future__ import annotations

import contextlib
import dis
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopipe.devices import reraise_failure_of_device
from autopipe.draws import random_states, set_random_states
from autopipe.trace.record.model_snapshot import BufferSnapshot
from autopipe.trace.state.snapshots.snapshot import DRAWN, Place, Snapshot
from autopipe.trace.state.trying.isolation import OutOfTime, isolated
from autopipe.trace.state.trying.later import Changing, Iterating, changing, holding
from autopipe.trace.state.trying.writer import writing_line

_MOST_PLACES = 4096  # places whose values are replaced
_IN_A_ROW = 3  # runs, each of which begins with the state that the one before it left
_MOST_IN_A_ROW = 32  # such runs, if they take less than _SECONDS together
_SLOWER = 10  # times the time of a run, and seconds more, after which a run with another value is given up
_SECONDS = 1.0
_MOST_FAILING = 4  # places where the last value is searched for that does not fail
_MOST_RUNS = 100  # times the time of a run, and seconds more, after which no other values are tried
_MOST_SECONDS = 60.0
_DEEPEST = 2  # probes of what only the runs of another probe change


@dataclass
class Probe:
    """Runs forward and loss with other values at places that change from run to run."""

    run: Callable[[], Any]  # runs forward and loss once, and returns the loss
    model: nn.Module
    last: Snapshot  # restored after each run
    look: Callable[[], Snapshot]  # takes a snapshot of the present state
    constants: tuple[Sequence[int], Sequence[Any]] = ((), ())  # numbers in the code; of them, those near C functions
    known: set[Place] = field(default_factory=set)  # places that change, and are tried or need not be
    before: Tensor | None = None  # the loss of the run before, which may have begun with other buffers
    is_repeatable: bool = True  # whether two runs from the same state have the same result
    _wanted: tuple[Any, ...] = ()
    _iterators: list[Iterating] = field(default_factory=list)
    _leading: list[tuple[Changing | Iterating, Any]] = field(default_factory=list)  # to a change of that place
    _later: Place | None = None  # a place that the last run changed, and whose later values the loss depends on
    _failing: list[tuple[Changing, Any]] = field(default_factory=list)  # values that the code cannot handle
    _seconds: float = 0.0  # of one run
    _deadline: float = 0.0
    _depth: int = 0  # of the probes that this one is for
    unknown: list[str] = field(default_factory=list)  # names of places with a later value that could not be tried

    def __post_init__(self) -> None:
        self._fixed = _Fixed(self.last)

    def affecting(self, places: Sequence[Place], before: Snapshot) -> Place | None:
        """Return the first place whose value the loss depends on, or None. ``before``: the snapshot one run earlier.

        Runs that differ although they begin with the same state, as far as it can be restored, depend on state that
        cannot be restored: the first place is returned.
        """
        if not places:
            return None
        tried = [one for place in places[:_MOST_PLACES] for one in changing(place, before, self.last)]
        self.known.update(places)
        for one in tried:
            if isinstance(one, Iterating):
                self.known.update(holding(one.iterator, self.last))
        self._iterators += [one for one in tried if isinstance(one, Iterating)]
        first = tried[0].place if tried else places[0]
        start = time.monotonic()
        with _failures() as failed:
            self._wanted = self._outcome([])
            self._seconds = self._seconds or time.monotonic() - start
            self.is_repeatable = self._outcome([]) == self._wanted
        if failed:
            return None  # the model fails at its next step, in training too
        if not self.is_repeatable or (
            self.before is not None and self._fixed.buffers.is_empty() and self._result(self.before) != self._wanted
        ):
            return first
        self._deadline = self._deadline or time.monotonic() + self._seconds * _MOST_RUNS + _MOST_SECONDS
        return self._try(tried) or self._try_before_failures() or (first if self._differs_in_a_row() else None)

    def writer(self, owner: Any, key: Any) -> str:
        """Return the line (file, line and text) of the user's code that changes the value at a place, or ""."""

        def run() -> None:
            with _failures(), self._isolated(bool(self._leading)):  # the line may have run before a failure
                self.run()

        try:
            for one, value in self._leading:
                one.set(value)
            return writing_line(run, owner, key)
        finally:
            self._restore()

    def _try(self, tried: list[Changing | Iterating]) -> Place | None:
        """Run with later values, at first in all places together."""
        if not tried:
            return None
        self._watch(tried)
        values = [(one, one.candidates()) for one in tried]
        for index in range(max(len(candidates) for _, candidates in values)):
            chosen = [(one, candidates[index]) for one, candidates in values if index < len(candidates)]
            place = self._differing(chosen)
            if place is not None:
                return place
        return None

    def _try_before_failures(self) -> Place | None:
        """Run with the last values that the code can handle: a table may end where a later value fails."""
        first_failing: dict[int, tuple[Changing, Any]] = {}
        for one, value in self._failing:
            first_failing.setdefault(id(one), (one, value))
        for one, first in list(first_failing.values())[:_MOST_FAILING]:
            last, failing = one.value, first
            while (value := one.between(last, failing)) is not None and time.monotonic() < self._deadline:
                self._failing.clear()
                if self._differing([(one, value)]) is not None:
                    return one.place
                last, failing = (last, value) if self._failing else (value, failing)
        return None

    def _watch(self, tried: list[Changing | Iterating]) -> None:
        """Run once with numbers that note what they are compared with."""
        with _failures(), self._restored():  # what was noted until a failure is of use
            for one in tried:
                one.watch(*self.constants)
            with self._isolated():
                self.run()

    def _differing(self, chosen: list[tuple[Changing | Iterating, Any]]) -> Place | None:
        """Return a place whose value changes the outcome, or None. All values are tried together first."""
        if time.monotonic() > self._deadline:
            self._give_up(chosen)
            return None
        differs, place = False, None
        with _failures() as failed:  # of a value that the code cannot handle, and that it may never reach
            differs = self._outcome(chosen) != self._wanted
            place = None if differs else self._later
        if not failed and not differs:
            return place
        if len(chosen) == 1:
            one, value = chosen[0]
            is_code = bool(failed) and not isinstance(failed[0], OutOfTime)
            if is_code and isinstance(one, Changing) and isinstance(one.value, (int, np.integer)):
                self._failing.append((one, value))
            if failed and not is_code:
                self._give_up(chosen)
            return one.place if differs else None
        middle = len(chosen) // 2
        return self._differing(chosen[:middle]) or self._differing(chosen[middle:])

    def _outcome(self, chosen: list[tuple[Changing | Iterating, Any]]) -> tuple[Any, ...]:
        """Return the result of a run with these values at their places."""
        with self._restored():
            for iterator in self._iterators:
                iterator.renew()
            for one, value in chosen:
                one.set(value)
            with self._isolated(bool(chosen)):
                loss = self.run()
            for iterator in self._iterators:
                iterator.ran()
            outcome = self._result(loss)
            if chosen and outcome == self._wanted:
                self._later = self._affecting_later(chosen)
            return outcome

    def _isolated(self, is_later: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context for a run, which is isolated if it begins with a later state than those before it."""
        is_later = is_later or self._depth > 0
        return isolated(self._seconds * _SLOWER + _SECONDS) if is_later else contextlib.nullcontext()

    def _affecting_later(self, chosen: list[tuple[Changing | Iterating, Any]]) -> Place | None:
        """Return a place that only the last run changed, and whose later values the loss depends on, or None.

        ``chosen``: the values that the run began with.
        """
        self._later = None
        if self._depth >= _DEEPEST:
            return None
        after = self.look()
        changed = after.changed_since(self.last)
        places = [place for place in changed if place[0] in self.last.owners and place not in self.known]
        if self._iterators:  # the runs draw from copies of them
            places = [place for place in places if place[1] != DRAWN]
        if not places:
            return None
        later = Probe(self.run, self.model, after, self.look, self.constants, self.known)
        later._fixed, later._deadline, later._depth = self._fixed, self._deadline, self._depth + 1
        later._iterators, later._seconds, later.unknown = list(self._iterators), self._seconds, self.unknown
        place = later.affecting(places, self.last)
        if place is None and later._wanted and later._wanted != self._wanted:
            place = places[0]
        if place is not None:
            self._leading = chosen
            self.last.names.setdefault(place, after.names[place])
            self.last.owners.setdefault(place[0], after.owners[place[0]])
        return place

    def _give_up(self, chosen: list[tuple[Changing | Iterating, Any]]) -> None:
        """Note places with a value that could not be tried."""
        self.unknown += [name for one, _ in chosen if (name := self.last.names[one.place]) not in self.unknown]

    def _result(self, loss: Tensor) -> tuple[Any, ...]:
        """Return the loss, and what else of the model a run may change."""
        trained = tuple((name, parameter.requires_grad) for name, parameter in self.model.named_parameters())
        parts = tuple((name, type(part), part.training) for name, part in self.model.named_modules())
        return loss.dtype, tuple(loss.shape), loss.contiguous().reshape(-1).view(torch.uint8).tolist(), trained, parts

    def _differs_in_a_row(self) -> bool:
        """Return whether the result changes in a few runs with the same buffers and random numbers."""
        differs = False
        with _failures(), self._restored():
            for iterator in self._iterators:
                iterator.renew()
            start = time.monotonic()
            for index in range(_MOST_IN_A_ROW):
                with self._isolated(index >= _IN_A_ROW):
                    loss = self.run()
                differs = differs or self._result(loss) != self._wanted
                self._fixed.restore()
                if differs or (index >= _IN_A_ROW and time.monotonic() > start + _SECONDS):
                    break
        return differs

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        """Restore the state after the block."""
        self._fixed.restore()
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        try:
            self.last.restore()
        finally:
            self._fixed.restore()


class _Fixed:
    """Buffers, and the random generators of Python, numpy and torch: state that a snapshot does not restore."""

    def __init__(self, last: Snapshot) -> None:
        self.buffers = BufferSnapshot(owner for owner in last.owners.values() if isinstance(owner, nn.Module))
        self._draws = random_states()

    def restore(self) -> None:
        """Restore everything."""
        self.buffers.restore()
        set_random_states(self._draws)


@contextlib.contextmanager
def _failures() -> Iterator[list[BaseException]]:
    """Collect what the block raises, also SystemExit and the like, except Ctrl+C."""
    failed: list[BaseException] = []
    try:
        yield failed
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not _is_raised(error):
            raise
        reraise_failure_of_device(error)
        failed.append(error)


def _is_raised(error: BaseException) -> bool:
    """Return whether a ``raise`` statement raised an error, rather than a signal such as that of Ctrl+C."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


__all__ = ["Probe"]

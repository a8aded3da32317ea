"""Find what forward and loss do otherwise from step to step: the numbers that change, and how many other calls.

Halves of the first minibatches run on fake tensors, in the order of plain training, in a process that trains nothing:
until a minibatch leaves all Python state as it was, which most models do at once, or for 240 microbatches. Numbers in
calls that differ become inputs of the graph; each other sequence of calls gets stage code of its own.
"""

from __future__ import annotations

import contextlib
import re
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from autopipe.errors import AutopipeError, TraceError
from autopipe.ir.graph import Graph, Input
from autopipe.trace.explain import here
from autopipe.trace.numbers import MOST_NUMBERS, Call, changed_numbers
from autopipe.trace.result import Capture
from autopipe.trace.state.isolation import without_writes
from autopipe.trace.state.observing.files import POSITION, watched_files
from autopipe.trace.state.observing.observe import Ran, observed
from autopipe.trace.state.observing.reach import named, roots
from autopipe.trace.state.refusal import FORWARD, KEEP
from autopipe.trace.state.snapshots.snapshot import Snapshot
from autopipe.trace.state.users_functions import is_closed, may_change, reading_hook, setting_hook
from autopipe.trace.tape.results import VERSION_READ
from autopipe.trace.tape.tape import Difference, Known, Tape, difference_of
from autopipe.workload import Item, Workload
from autopipe.workload.batches.forms import form_of

_MOST_CALLS = 32
"""Other sequences of calls that may come in these microbatches."""
_MOST_RUNS = 240
"""Microbatches that are run."""
_FIRST_RUNS = 4
"""Microbatches that every training has."""
_EQUAL_RUNS, _EQUAL_SECONDS = 64, 0.5
"""Microbatches and time after which a model that changes no state is not looked at any more, if its data may do."""
_PARTS = 2
_WITH_EFFECTS = 2
"""Minibatches whose changes of files happen, so that what they leave in files is seen; later ones change none."""
_SETTLED = 8
"""Minibatches after which state that still changes is not compared any more."""
_MOST_SECONDS, _MOST_EQUAL_SECONDS = 20.0, 8.0
"""How long this takes at most; how much processor time without any difference."""
_NAME = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]]*\])*$")


@dataclass(frozen=True, slots=True)
class Change:
    """The first thing that forward or loss do otherwise."""

    text: str
    where: str = ""
    remedy: str = KEEP


class Survey(NamedTuple):
    """What changes. ``numbers``: as inputs of the graph; None if something changes that cannot, with ``why``.

    ``others``: graphs of other calls that read parameters or buffers which those of the first microbatch do not, those
    that read most of them first. ``first``: the first change; None if nothing changes, or if, with ``numbers`` None,
    it is not known whether anything does.
    """

    numbers: tuple[Input, ...] | None
    why: str = ""
    others: tuple[Graph, ...] = ()
    first: Change | None = None

    @property
    def is_unknown(self) -> bool:
        """Whether the calls could not be followed."""
        return self.numbers is None and self.first is None


NOTHING = Survey(())


def survey(workload: Workload, model: nn.Module) -> Survey:
    """Run the first minibatches, and return what forward and loss do otherwise in some of them."""
    tape = Tape(workload, model, varies=True)
    scheduler = None if tape.steps is None else tape.steps.scheduler
    setting, hooks = setting_hook(workload, model, scheduler), workload.functions()
    is_stepped = "after_step" in hooks and not is_closed(hooks["after_step"])
    looking = _Looking(workload, model, tape, bool(setting) or is_stepped or may_change(hooks.get("data")))
    ended = looking.run()
    hooks_fail = "" if tape.steps is None else tape.steps.why_not
    is_unknown = ended.is_unknown if ended is not None else hooks_fail and looking.first is None
    if setting and is_unknown:  # nothing would compare what follows from it
        return Survey(None, hooks_fail, first=Change(setting))
    if ended is not None:
        return ended
    varies = looking.first is not None and not looking.is_unused()
    reading = reading_hook(workload, scheduler, looking.written, varies=varies)
    if not varies:
        return Survey(None, "", first=Change(reading)) if reading else NOTHING
    if len(tape.numbers) > MOST_NUMBERS:
        return Survey(None, f"more than {MOST_NUMBERS} numbers change", first=looking.first)
    if hooks_fail:
        return Survey(None, hooks_fail, first=looking.first)
    if reading:
        return Survey(None, reading, first=looking.first)
    every = looking.every
    others = [graph for graph in every if not _state(graph) <= _state(every[0])]
    return Survey(tape.numbers, "", tuple(sorted(others, key=lambda graph: -len(_state(graph)))), looking.first)


@dataclass
class _Looking:
    """The runs."""

    workload: Workload
    model: nn.Module
    tape: Tape
    others_may_change: bool  # data, or hooks between minibatches, may set what forward and loss read
    first: Change | None = None
    calls_differ: bool = False  # more than their numbers do
    every: list[Graph] = field(default_factory=list)  # of all sequences of calls
    written: dict[str, str] = field(default_factory=dict)  # what data, forward and loss change: its name -> as text
    is_settled: bool = False  # a minibatch has left all Python state as it was
    _numbers: dict[Any, dict[Call, list[tuple[int, Any]]]] = field(default_factory=dict)  # form -> those of its calls
    _graphs: dict[Any, list[Graph]] = field(default_factory=dict)  # form -> its sequences of calls
    _ran: dict[types.CodeType, Ran] = field(default_factory=dict)
    _seeds: list[str] = field(default_factory=list)  # the lines that seed torch's generator
    _state: Snapshot | None = None  # before the minibatch

    def run(self) -> Survey | None:
        """Run the microbatches. Return a survey if it ends here."""
        with contextlib.ExitStack() as stack:
            return self._run(stack)

    def _run(self, stack: contextlib.ExitStack) -> Survey | None:
        """``stack``: receives what lets later minibatches change no files."""
        start, steps = time.monotonic(), 0
        processor = time.process_time()
        for run, (part, is_last) in zip(range(_MOST_RUNS), self._microbatches(), strict=False):
            try:
                with contextlib.nullcontext() if steps >= _WITH_EFFECTS else watched_files() as files:
                    difference = self._follow(part)
                if self._seeds:
                    return _of_seed(self._seeds[0])
                if is_last:
                    steps += 1
                    self._end_minibatch(steps)
                    if steps == _WITH_EFFECTS:
                        stack.enter_context(without_writes())
            except TraceError as error:
                is_unknown = run == 0 and error.what != VERSION_READ
                first = None if is_unknown else Change(error.what, error.where, error.remedy or KEEP)
                return Survey(None, error.what, first=first)
            carried = {} if files is None or run == 0 else files.carried()
            for name, line in carried.items():
                if not name.startswith(POSITION):  # of a descriptor of this process
                    text = f"{FORWARD} changes {name}, and reads what an earlier call left there"
                    why, remedy = "other processes run them, too", f"{KEEP}; for a log, write without reading"
                    return Survey(None, why, first=Change(text, line, remedy))
            if difference is not None:
                if difference.is_raised and run >= _FIRST_RUNS:
                    break  # plain training raises it, too, if it comes so far
                if self.first is not None and not self.is_unused():
                    return Survey(None, _what(difference), first=self.first)
                first = Change(_what(difference), difference.where, difference.remedy)
                return Survey(None, "more than numbers changes", first=first)
            if sum(len(each) - 1 for each in self._graphs.values() if each) > _MOST_CALLS:
                why = f"it makes more than {_MOST_CALLS} other sequences of calls in {run + 1} microbatches"
                return Survey(None, why, first=self.first)
            seconds = time.process_time() - processor
            is_late = time.monotonic() - start > _MOST_SECONDS
            if is_late or (self.first is None and seconds > _MOST_EQUAL_SECONDS):
                break
            is_long = not self.others_may_change or run + 1 >= _EQUAL_RUNS or seconds > _EQUAL_SECONDS
            if len(self.tape.numbers) > MOST_NUMBERS or (self.is_settled and is_long and self.first is None):
                break
        return None

    def is_unused(self) -> bool:
        """Return whether only numbers differ, of calls that the loss does not depend on, such as a mean for the log."""
        graphs = [graph for each in self._graphs.values() for graph in each]
        read = {name for graph in graphs for node in graph.nodes for name in node.inputs}
        return bool(graphs) and not self.calls_differ and read.isdisjoint(entry.name for entry in self.tape.numbers)

    def _microbatches(self) -> Iterator[tuple[Item, bool]]:
        """Yield the halves of the minibatches, each with whether it is the last one, as long as the data has some."""
        epoch = count = 0
        while True:
            try:
                for item in self.workload.items(None, epoch=epoch):
                    parts = self.workload.split(item, _PARTS)
                    yield from ((part, part is parts[-1]) for part in parts)
                    count += 1
            except AutopipeError:
                if not count:
                    raise
                return  # plain training raises it, too
            epoch += 1

    def _follow(self, part: Item) -> Difference | None:
        """Run a microbatch, and note numbers that differ from those of an earlier one of its form."""
        tape = self.tape
        form = form_of(part)
        known = self._graphs.setdefault(form, [])
        tape.seen = {}
        graphs: dict[str, Known] = {str(number): (graph, {}) for number, graph in enumerate(known)}

        def follow() -> Difference | None:
            return tape.run(part, graphs, self._adding(known))

        if tape.num_runs != 1:  # the first run, with all that torch does in it, would take several times as long
            difference = follow()
        else:
            difference = observed(follow, self._ran, seeding=lambda: self._seeds.append(here()))
        if difference is not None:
            return difference
        before = self._numbers.setdefault(form, {})
        if new := changed_numbers(before, tape.seen, tape.numbers):
            number = new[0].number
            assert number is not None, "the input is a number of a call"
            now = dict(tape.seen[number.function, number.place, number.call])[number.argument]
            text = f"a number of {number.function} differs from call to call, {number.hint} and {now!r}"
            self.first = self.first or Change(text, number.place)
            tape.numbers += new
            tape.roots.clear()
            self._graphs.clear()
        for call, numbers in tape.seen.items():
            before.setdefault(call, numbers)
        return None

    def _adding(self, known: list[Graph]) -> Callable[[Capture], str]:
        def add(captured: Capture) -> str:
            if known:
                self.calls_differ = True
                difference = None if self.first is not None else difference_of(known[-1], {}, captured.graph)
                self.first = self.first if difference is None else Change(_what(difference), difference.where)
            known.append(captured.graph)
            self.every.append(captured.graph)
            return str(len(known) - 1)

        return add

    def _end_minibatch(self, steps: int) -> None:
        """Run the hooks after a minibatch, and compare the Python state, unless a minibatch has left it as it was.

        ``steps``: minibatches that have been run.
        """
        before, is_compared = self._state, not self.is_settled and steps <= _SETTLED
        now = self._snapshot() if is_compared else None
        changed = () if now is None or before is None else now.changed_since(before)
        if now is not None:
            self.written.update((name, now.names[place]) for place in changed for name in _named(now.names[place]))
        if (hooks := self.tape.steps) is not None and not hooks.why_not:
            try:
                hooks.run()
            except TraceError as error:
                hooks.why_not = error.what
            if now is not None and (hooks.has_hook or hooks.scheduler is not None):
                after = self._snapshot()
                now, changed = after, changed or after.changed_since(now)
        if is_compared:
            self.is_settled, self._state = before is not None and not changed, now

    def _snapshot(self) -> Snapshot:
        hooks = self.workload.functions()
        snapshot = Snapshot.of(roots(self.model, hooks, self._ran.values()))
        snapshot.extend(root for ran in self._ran.values() for root in named(ran))
        return snapshot


def _named(path: str) -> list[str]:
    """Return the name of what changes, from its readable path: ``STEPS`` for ``model.STEPS[0]['a']``."""
    return _NAME.findall(path.partition(" of ")[0])


def _of_seed(where: str) -> Survey:
    text = (
        "the forward or the loss seeds torch's random numbers: a run seeds every operation by its place, so the call "
        "has no effect"
    )
    remedy = "remove the call; register random numbers that are equal in every step as a buffer"
    return Survey(None, "", first=Change(text, where, remedy))


def _what(difference: Difference) -> str:
    if difference.recorded:
        return f"{FORWARD} does not do the same for each batch: first {difference.recorded}, then {difference.now}"
    return f"{FORWARD} does not do the same for each batch: {difference.now}"


def _state(graph: Graph) -> set[str]:
    return {name for node in graph.nodes for name in (*node.parameters, *node.buffers, *node.buffers_written)}

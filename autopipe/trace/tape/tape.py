"""``Tape``: run the user's Python for every microbatch, on fake tensors, and compare it with the stage code.

The forward and the loss decide what a step computes by Python: a counter, a file, an attribute that the data sets. A
stage runs what was recorded. So the process that reads the data runs model and loss for each microbatch, in the order
of plain training, without numbers in its tensors, and a microbatch for which they do something else ends the run.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autopipe.errors import AutopipeError, TraceError
from autopipe.ir.graph import Graph, Input, Node
from autopipe.trace.explain import depends_on_data
from autopipe.trace.graph.describe import GUARD, describe
from autopipe.trace.lines.of_nodes import where_text
from autopipe.trace.numbers import Call, Numbers, tensors_of
from autopipe.trace.record import rebound
from autopipe.trace.record.caches import MemoizedFakes
from autopipe.trace.record.follow import Followed, clean, running
from autopipe.trace.record.recorder import Recorder
from autopipe.trace.record.symbols import Symbols
from autopipe.trace.state.refusal import KEEP
from autopipe.trace.state.snapshots.settings import OF_RESULTS, SETTINGS
from autopipe.trace.strategies import EXPORT
from autopipe.trace.tape.backward import Inner, reads_more_than_its_arguments, run_backward
from autopipe.trace.tape.entries import Entry, Origins
from autopipe.trace.tape.keys import Contents, Keys
from autopipe.trace.tape.live import LiveModel
from autopipe.trace.tape.programs import CONSTANT, first_difference
from autopipe.trace.tape.reading import Reading
from autopipe.trace.tape.results import OWN, forms_of, is_held
from autopipe.workload import Item, Workload

logger = logging.getLogger(__name__)

_MOST_RUNS = 64
"""Sequences of calls with the same result that are kept for batches of one form."""
_MOST_FORMS = 128
"""Forms of batches whose calls are kept."""
_CPU = torch.device("cpu")


def why_unknown(graph: Graph) -> str:
    """Return why the calls of a model cannot be compared with a graph, "" if they can."""
    opaque = next((node for node in graph.nodes if node.opaque), None)
    if opaque is not None:
        return f"{opaque.target} runs as it is"
    if any(node.target == GUARD for node in graph.nodes):
        return "it decides by the numbers of the batch (--allow-data-dependent)"
    if EXPORT in graph.captured_by:
        return f"it was captured by {EXPORT}"
    return "a team runs each stage" if graph.complete else ""


@dataclass(frozen=True, slots=True)
class Difference:
    """What model and loss do otherwise for a microbatch than the stage code does."""

    recorded: str  # the call of the stage code, with its line; "" if none is known
    now: str  # the call of this microbatch, or what happened in its place
    where: str = ""  # the user's line of ``now``
    remedy: str = KEEP


class Tape:
    """The user's model and loss, in the state in which the microbatches before this one left them."""

    def __init__(self, workload: Workload, model: nn.Module, numbers: tuple[Input, ...] = ()) -> None:
        """``model``: has the user's Python; its weights may be real, fake or on meta, and are not changed.

        ``numbers``: the inputs of the graph that are numbers of the user's code.
        """
        from autopipe.trace.record.shape_env import FollowingShapeEnv  # it imports sympy

        self.workload, self.model, self.numbers = workload, model, numbers
        self.values: dict[str, Any] = {}  # of ``numbers``, in the latest run
        self.seen: dict[Call, list[tuple[int, Any]]] | None = None  # receives the numbers in all calls of a run
        self.recorded = False  # whether the latest run did something that no run before it did
        self.performed = 0  # calls of the latest run that no known result served
        self.num_runs = 0
        self.follows_backward = True  # the user's Python of the backward pass can run on fakes
        self._shape_env = FollowingShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._shape_env, allow_non_fake_inputs=True)
        self._live = LiveModel(model, self._mode, _CPU)
        self._roots: dict[Hashable, Entry] = {}
        self._contents, self._origins = Contents(), Origins()
        self._memoized = MemoizedFakes(model)
        self._fakes: Any = None  # of the first recorder: its results outlive a run
        self._settings: dict[str, Any] = {}  # before the first run
        self._moved: frozenset[str] = frozenset()  # settings that the latest run has changed

    def run(self, item: Item, graph: Graph | None, sizes: Mapping[str, int]) -> Difference | None:
        """Run model and loss for one microbatch. Return how they differ from the graph that the stages run, or None.

        ``graph``: None if the microbatch is not compared. ``sizes``: of the symbols of the graph for this batch.

        Raises: TraceError if the first run cannot be followed.
        """
        leaves = self.workload.leaves(item)
        root = self._root(item, leaves, graph)
        outside = _Outside()
        self._settings = self._settings or outside.settings
        run = _Run(self, item, leaves, root)
        try:
            with torch.enable_grad():
                end = run.end()
            difference = None
            reading = run.reading
            assert reading is not None, "a run that has ended has read calls"
            self.recorded, self.values = reading.records, run.numbers.values
            if reading.records:
                if graph is not None:
                    difference = _of_graphs(graph, sizes, run.graph())
                if difference is None:
                    reading.accept(end, run.backward)
            elif run.backward != reading.at.ends[end]:
                difference = Difference("", "the backward pass computes otherwise: a hook, or an autograd.Function")
        except TraceError as error:
            if not self.num_runs:
                raise
            difference = _failed(error, run.recorded())
        finally:
            run.close()
            self._memoized.forget()
        if difference is None and graph is not None and len(self.values) < len(self.numbers):
            difference = Difference("", "a number that travels with each batch is not in the call that was recorded")
        moved = outside.moved()
        difference = difference or outside.difference(self._settings, moved, self._moved)
        self._moved = moved if self.num_runs else frozenset()
        self.num_runs += 1
        return difference

    def _root(self, item: Item, leaves: Mapping[str, Tensor], graph: Graph | None) -> Entry:
        # numbers and text in the batch need no root of their own: a call that reads one has it in its key
        structure = pytree.tree_structure(item)
        forms = tuple((n, t.dtype, tuple(t.shape), t.stride(), t.requires_grad) for n, t in leaves.items())
        form = (str(structure), forms, "" if graph is None else graph.digest)
        root = self._roots.get(form)
        if root is None or root.num_runs > _MOST_RUNS:
            if len(self._roots) >= _MOST_FORMS:
                del self._roots[next(iter(self._roots))]
            root = self._roots[form] = Entry()
        return root


class _Run:
    """One run of model and loss."""

    def __init__(self, tape: Tape, item: Item, leaves: Mapping[str, Tensor], root: Entry) -> None:
        self.tape, self.item, self.leaves = tape, item, leaves
        self.symbols = Symbols(tape._shape_env)
        self.copied: Mapping[str, Any] = {}
        self.reads_training = False
        self.backward: list[Any] = []  # the calls of the user's Python in the backward pass
        self.recorder: Recorder | None = None
        self.reading: Reading | None = None
        self.root = root
        self.numbers = Numbers(tape.numbers, tape.seen)

    def end(self) -> Hashable:
        """Run, and return what identifies the loss, its weight and the buffers that are bound to new tensors.

        Raises: TraceError.
        """
        tape, live = self.tape, self.tape._live
        with live:
            self.recorder = recorder = Recorder(live, self.symbols)
            recorder.fakes = tape._fakes = tape._fakes or recorder.fakes
            recorder.numbers = self.numbers
            keys = Keys(live, tape._contents, tape._origins.identity)
            self.reading = recorder.tape = reading = Reading(self.root, recorder, keys, tape._origins)
            tape._shape_env.around = lambda: recorder.modules.around
            tape._shape_env.on_answer = recorder.answers.on_comparison
            with running(recorder, tape._mode, symbolic=False) as reads:
                fakes = dict(self._inputs(recorder, keys))
                loss, weight = tape.workload.loss(tape.model, tape.workload.with_leaves(self.item, fakes))
                outputs = (loss,) if weight is None else (loss, weight)
                bound = {name: keys.number(value) for name, value in live.reassigned_buffers().items()}
                new = tuple(live.new_parameters())
                end = (*map(keys.number, outputs), *bound.items(), *new)
                reading.ended(end)
                if reading.records:
                    recorder.tape = None
                    self.copied = rebound.copy_into_buffers(recorder, live, loss)
                    recorder.writer.set_output(outputs)
                if live.hooked or any(map(reads_more_than_its_arguments, recorder.custom_functions)):
                    self._run_backward(recorder, loss)
            self.reads_training = reads.seen
        tape.performed = reading.performed
        return end

    def _run_backward(self, recorder: Recorder, loss: Tensor) -> None:
        """Run the backward pass for the user's Python in it. What it computes with numbers is left to the search."""
        live = self.tape._live
        if self.tape.follows_backward and loss.requires_grad:
            try:
                with recorder.paused(), Inner(self.backward):
                    run_backward(loss)
            except Exception as error:
                logger.info("the backward pass is not followed: %s", error)
                self.tape.follows_backward = False
                self.backward.clear()
            with recorder.paused():
                for fake in live.fake.values():
                    fake.grad = None

    def _inputs(self, recorder: Recorder, keys: Keys) -> Iterator[tuple[str, Tensor]]:
        root = self.root
        with recorder.paused():
            numbers = {n: self.tape._mode.from_tensor(t) for n, t in tensors_of(self.tape.numbers).items()}
            if not root.results or is_held(root.results, OWN) or forms_of(root.results) != root.form:
                root.results = [
                    torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=_CPU, requires_grad=t.requires_grad)
                    for t in self.leaves.values()
                ]
                root.form = forms_of(root.results)
            keys.add(root.results)
        for name, number in numbers.items():
            recorder.writer.add_input(name, number)
        for index, name in enumerate(self.leaves):
            recorder.writer.add_input(name, root.results[index])
            yield name, root.results[index]

    def graph(self) -> Graph:
        """Return the graph of a recorded run. Raises: TraceError if the stages could not run it."""
        assert self.recorder is not None, "only a run that has ended has a graph"
        clean(self.recorder, self.tape._live, self.copied, self.tape.workload.num_samples(self.item))
        followed = Followed(self.recorder, self.tape._live, self.symbols, (), self.reads_training, None)
        return describe(followed, self.tape.workload.name)

    def close(self) -> None:
        """Drop all references to results: a result that something else has is taken for one that Python keeps."""
        environment = self.tape._shape_env
        environment.around, environment.on_answer = tuple, None
        if self.recorder is not None:
            for node in self.recorder.graph.nodes:
                node.meta.clear()
            self.recorder.writer.known.clear()
            self.recorder.tape = None
        if self.reading is not None:
            self.reading.close()

    def recorded(self) -> str:
        """Return the known call in whose place this run did something else, with its line."""
        entry = None if self.reading is None else self.reading.following()
        if entry is None:
            return ""
        return _text(entry.name, where_text(entry.nodes[0]) if entry.nodes else "")


class _Outside:
    """What a run must leave as it is: random generators, and settings of the process."""

    def __init__(self) -> None:
        self.settings = dict(SETTINGS.all())
        self._states = _states()

    def moved(self) -> frozenset[str]:
        """Return the settings that have changed since."""
        now = dict(SETTINGS.all())
        return frozenset(name for name, value in self.settings.items() if now[name] != value)

    def difference(self, first: Mapping[str, Any], moved: frozenset[str], before: frozenset[str]) -> Difference | None:
        """Return what the run has changed, or what was changed before it.

        ``first``: the settings before the first run. ``moved``: those that the run has changed; ``before``: those that
        the run before has changed. A setting that does not decide how torch computes may change once, as when a module
        is imported.
        """
        for name in OF_RESULTS:
            if self.settings[name] != first[name]:
                recorded, now = f"{name} = {first[name]!r}", f"{name} = {self.settings[name]!r}"
                return Difference(recorded, now, remedy="set it once, in the model file")
        for name in moved:
            if name in OF_RESULTS or name in before:
                changed = f"the forward or the loss changes the setting {name}"
                return Difference("", changed, remedy="set it once, where the model is built")
        for name, state, after in zip(("torch", "numpy.random", "random"), self._states, _states(), strict=True):
            if state != after:
                return Difference("", f"the forward or the loss draws from the generator of {name}, or seeds it")
        return None


def _states() -> tuple[Any, ...]:
    numpys: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), (numpys[1].tobytes(), numpys[2:]), random.getstate()


def _failed(error: TraceError, recorded: str) -> Difference:
    """Return the difference that a run has which ends with an error. ``recorded``: the call in whose place it ends."""
    cause = error.__cause__
    if cause is None or isinstance(cause, AutopipeError) or depends_on_data(cause):
        return Difference(recorded, error.what, error.where, error.remedy or KEEP)
    text = f"{type(cause).__name__}: {cause}".strip(": ")
    return Difference("", f"it raises {text}", error.where, "if plain training does not raise it here, " + KEEP)


def _of_graphs(graph: Graph, sizes: Mapping[str, int], now: Graph) -> Difference | None:
    pair = first_difference(graph, sizes, now)
    if pair is None:
        return None
    recorded, other = pair
    if other is None:
        return Difference(_placed(recorded), "the forward or the loss does not make this call")
    same = _call(recorded) == _call(other)
    more = ", where Python holds a tensor with other numbers" if same else ""
    return Difference(_placed(recorded), _placed(other) + more, other.place)


def _call(node: Node | None) -> str:
    if node is None:
        return ""
    call = f"{node.target}{' = ' if node.kind == 'call_module' else ''}{node.arguments}"
    return CONSTANT.sub("constant", call)


def _placed(node: Node | None) -> str:
    return "" if node is None else _text(_call(node), node.place)


def _text(call: str, place: str) -> str:
    return f"{call} at {place}" if place else call


__all__ = ["Difference", "Tape", "why_unknown"]

"""``Tape``: run the user's Python for every microbatch, on fake tensors, and compare it with the stage code.

The forward and the loss decide what a step computes by Python: a counter, a file, an attribute that the data sets. A
stage runs what was recorded. So the process that reads the data runs model and loss for each microbatch, in the order
of plain training, without numbers in its tensors. If they do something else for one, that is a ``Difference``, or is
recorded for the stages.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
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
from autopipe.trace.graph.naming import rename
from autopipe.trace.graph.replay import assemble
from autopipe.trace.lines.of_nodes import where_text
from autopipe.trace.numbers import CHANGING, Call, Numbers, tensors_of
from autopipe.trace.record import rebound
from autopipe.trace.record.caches import MemoizedFakes
from autopipe.trace.record.follow import Followed, clean, running
from autopipe.trace.record.recorder import Recorder
from autopipe.trace.record.symbols import Symbols
from autopipe.trace.result import Capture
from autopipe.trace.state.refusal import KEEP
from autopipe.trace.state.snapshots.settings import OF_RESULTS, SETTINGS
from autopipe.trace.strategies import EXPORT
from autopipe.trace.tape.backward import Inner, reads_more_than_its_arguments, run_backward
from autopipe.trace.tape.entries import Entry, Origins, Roots
from autopipe.trace.tape.keys import Contents, Keys
from autopipe.trace.tape.live import LiveModel, Steps, settings_of_layers
from autopipe.trace.tape.programs import CONSTANT, first_difference
from autopipe.trace.tape.reading import Reading
from autopipe.trace.tape.results import OWN, forms_of, is_held
from autopipe.workload import Item, Workload
from autopipe.workload.batches.forms import form_of

logger = logging.getLogger(__name__)

Known = tuple[Graph, Mapping[str, int]]
"""A graph, and the sizes of its symbols for a batch."""
METHOD = "calls of the model for one microbatch"
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
    is_raised: bool = False  # the user's code, or torch, raises an exception


class Tape:
    """The user's model and loss, in the state in which the microbatches before this one left them."""

    def __init__(
        self, workload: Workload, model: nn.Module, numbers: tuple[Input, ...] = (), *, varies: bool = False
    ) -> None:
        """``model``: has the user's Python; its weights may be real, fake or on meta, and are not changed.

        ``numbers``: the inputs of the graph that are numbers of the user's code. ``varies``: nothing else has verified
        what the user's code does between two forward passes, so that a backward pass which cannot run is refused.
        """
        from autopipe.trace.record.shape_env import FollowingShapeEnv  # it imports sympy

        self.workload, self.model, self.numbers, self.varies = workload, model, numbers, varies
        self.values: dict[str, Any] = {}  # of ``numbers``, in the latest run; the first value of one that it lacks
        self.followed = ""  # the name of the stage code that does what the latest run did
        self.seen: dict[Call, list[tuple[int, Any]]] | None = None  # receives the numbers in all calls of a run
        self.performed = 0  # calls of the latest run that no known result served
        self.num_runs = 0
        self.follows_backward = True  # the user's Python of the backward pass can run on fakes
        self._shape_env = FollowingShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._shape_env, allow_non_fake_inputs=True)
        is_stepped = varies or workload.stepping.is_customized or "after_step" in workload.hooks
        self.steps = Steps(workload, model, varies=varies) if is_stepped else None
        self._live = LiveModel(model, self._mode, _CPU)
        self.roots = Roots()
        self._built = settings_of_layers(model)
        self._contents, self._origins = Contents(), Origins()
        self._memoized = MemoizedFakes(model)
        self._fakes: Any = None  # of the first recorder: its results outlive a run
        self._settings: dict[str, Any] = {}  # before the first run

    def run(
        self, item: Item, known: Mapping[str, Known] | None, write: Callable[[Capture], str] | None = None
    ) -> Difference | None:
        """Run model and loss for one microbatch. Return how they differ from what the stages may run, or None.

        ``known``: what the stages may run for a batch of this form, by name; None if the microbatch is not compared.
        ``write``: writes the stage code of a run that does something else, and returns its name; None: it is refused.

        Raises: TraceError if the first run cannot be followed; the errors of ``write``.
        """
        leaves = self.workload.leaves(item)
        root = self._root(item, leaves, compared=known is not None)
        outside = _Outside()
        self._settings = self._settings or outside.settings
        run = _Run(self, item, leaves, root)
        try:
            with torch.enable_grad():
                end = run.end()
            difference, name = None, ""
            reading = run.reading
            assert reading is not None, "a run that has ended has read calls"
            if reading.records:
                if known is not None:
                    name, difference = _compared(run, known, write)
                if difference is None:
                    reading.accept(end, run.backward, name)
            else:
                backward, name = reading.at.ends[end]
                if run.backward != backward:
                    difference = Difference("", "the backward pass computes otherwise: a hook, or an autograd.Function")
            if self.varies and not self.follows_backward:
                difference = Difference("", "a hook or an autograd.Function of the backward pass fails without numbers")
            self.followed, self.values = name, run.numbers.all_values()
        except TraceError as error:
            if not self.num_runs:
                raise
            difference = _failed(error, run.recorded())
        finally:
            run.close()
            self._memoized.forget()
        difference = difference or outside.difference(self._settings)
        self.num_runs += 1
        return difference

    def after_minibatch(self) -> None:
        """Run the user's Python between two minibatches. Raises: TraceError."""
        if self.steps is not None:
            self.steps.run()

    def _root(self, item: Item, leaves: Mapping[str, Tensor], *, compared: bool) -> Entry:
        # numbers and text in the batch need no root of their own: a call that reads one has it in its key
        structure = pytree.tree_structure(item)
        forms = tuple((n, t.dtype, tuple(t.shape), t.stride(), t.requires_grad) for n, t in leaves.items())
        return self.roots.of((str(structure), forms, compared))


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
            recorder.fakes = recorder.modules.fakes = tape._fakes = tape._fakes or recorder.fakes
            recorder.numbers, recorder.modules.opened = self.numbers, tape.varies
            keys = Keys(live, tape._contents, tape._origins.identity)
            self.reading = recorder.tape = reading = Reading(
                self.root, recorder, keys, tape._origins, tape._built, alone=not tape.num_runs
            )
            tape._shape_env.around = lambda: recorder.modules.around
            tape._shape_env.on_answer = recorder.answers.on_comparison
            with running(recorder, tape._mode, symbolic=False) as reads:
                fakes = dict(self._inputs(recorder, keys))
                loss, weight = tape.workload.loss(tape.model, tape.workload.with_leaves(self.item, fakes))
                outputs = (loss,) if weight is None else (loss, weight)
                rebound_to = live.reassigned_buffers()
                tape._origins.written.update(rebound_to)
                bound = {name: keys.of_tensor(value) for name, value in rebound_to.items()}
                new = tuple(live.new_parameters())
                end = (*map(keys.of_tensor, outputs), *bound.items(), *new)
                reading.ended(end, (*outputs, *rebound_to.values()))
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
        """Run the backward pass for the user's Python in it. It may set what a later forward reads."""
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
        recorder = self.recorder
        assert recorder is not None, "only a run that has ended has a graph"
        clean(recorder, self.tape._live, self.copied, self.tape.workload.num_samples(self.item))
        rename(recorder.graph)
        followed = Followed(recorder, self.tape._live, self.symbols, (), self.reads_training, None)
        form = replace(form_of(self.item), reads=recorder.layout_read)
        return replace(describe(followed, self.tape.workload.name), captured_by=METHOD, batch=form, varies=True)

    def capture(self, graph: Graph) -> Capture:
        """Return the capture of a recorded run. ``graph``: of ``graph``."""
        recorder = self.recorder
        assert recorder is not None, "only a run that has ended has a graph"
        constants = dict(sorted(recorder.constants.items()))
        module = assemble(self.tape.model, recorder.graph, constants)
        return Capture(graph, module, constants, METHOD, {}, CHANGING, tuple(dict.fromkeys(recorder.notes)))

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
    """What a run must leave as it is: random generators, and settings that decide how torch computes."""

    def __init__(self) -> None:
        self.settings = dict(SETTINGS.all(OF_RESULTS))
        self._states = _states()

    def difference(self, first: Mapping[str, Any]) -> Difference | None:
        """Return what the run has changed, or what was changed before it. ``first``: settings before the first run."""
        now = dict(SETTINGS.all(OF_RESULTS))
        for name, value in self.settings.items():
            if value != first[name]:
                recorded, other = f"{name} = {first[name]!r}", f"{name} = {value!r}"
                return Difference(recorded, other, remedy="set it once, in the model file")
            if now[name] != value:
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
    remedy = f"if plain training does not raise it here, {KEEP}"
    return Difference("", f"it raises {text}", error.where, remedy, is_raised=True)


def _compared(
    run: _Run, known: Mapping[str, Known], write: Callable[[Capture], str] | None
) -> tuple[str, Difference | None]:
    """Return the name of the stage code that does what a recorded run did; else how the latest differs."""
    now, differences = run.graph(), []
    for name, (graph, sizes) in known.items():
        difference = difference_of(graph, sizes, now)
        if difference is None:
            return name, None
        differences.append(difference)
    if write is not None:
        return write(run.capture(now)), None
    return "", differences[-1]


def difference_of(graph: Graph, sizes: Mapping[str, int], now: Graph) -> Difference | None:
    """Return the first call in which a recorded run differs from a graph. ``sizes``: of the symbols of the graph."""
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


__all__ = ["Difference", "Known", "Tape", "difference_of", "why_unknown"]

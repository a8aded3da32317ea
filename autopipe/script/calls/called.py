"""``Called``: one call of the model, whose Python runs on tensors without numbers beside the known calls."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autopipe.errors import TraceError
from autopipe.ir.graph import Graph
from autopipe.script.calls.kept_tensors import (
    ConstantResults,
    KeptTensors,
    give,
    give_parameters,
    give_results,
    path_to,
    refuse_kept,
    refuse_registered,
)
from autopipe.script.calls.numbers_of_call import NumbersOfCall
from autopipe.script.calls.outputs import Output, output_of, shown
from autopipe.script.calls.surroundings import entered, in_order, unrecognized
from autopipe.script.calls.tape import CallTape
from autopipe.script.devices import generators, set_generators
from autopipe.script.lazy import Lazy
from autopipe.script.refusals import EffectError
from autopipe.script.settings import autocast_now
from autopipe.trace.graph.describe import describe
from autopipe.trace.graph.naming import rename
from autopipe.trace.graph.replay import assemble
from autopipe.trace.lines.of_nodes import where_text
from autopipe.trace.numbers import Call, Numbers, tensors_of
from autopipe.trace.record import rebound
from autopipe.trace.record.follow import Followed, clean, running
from autopipe.trace.record.recorder import Recorder
from autopipe.trace.record.symbols import Symbols
from autopipe.trace.record.targets import property_name
from autopipe.trace.result import Capture
from autopipe.trace.tape.keys import Key, Keys
from autopipe.trace.tape.live import LiveModel, modules_of
from autopipe.trace.tape.reading import Reading
from autopipe.trace.tape.results import OWN, forms_of, is_held


@dataclass(frozen=True)
class Recording:
    """One call as a capture."""

    capture: Capture
    outputs: tuple[Output, ...]  # the tensors that it returns or keeps in attributes
    constants: dict[str, Tensor]  # tensors that are neither parameter nor buffer
    shared: bool  # whether two outputs, or an output and an input, share memory

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.capture.graph


class _Keys(Keys):
    """Refuses outputs of earlier calls and gradients, whose numbers this process does not have."""

    def of(self, target: Any, modes: tuple[Any, ...], *arguments: Any) -> Key:
        """Return the key of a call."""
        if getattr(target, "__name__", "") == "__get__" and property_name(target) in ("grad", "_grad"):
            raise EffectError("the forward reads a gradient", remedy="read it in the loop")
        return super().of(target, modes, *arguments)

    def _content(self, value: Tensor) -> Hashable:
        if isinstance(value, Lazy):
            what = f"the forward reads an output of an earlier call, of shape {tuple(value.shape)}"
            raise EffectError(what, remedy="pass it as an argument, with detach()")
        return super()._content(value)


@dataclass(frozen=True)
class _Ending:
    """How a run ended that is known. ``stages``: what runs such a call."""

    stages: Any
    constants: ConstantResults
    of_torch: dict[tuple[int, int], int] = field(default_factory=dict)  # see ``refuse_kept``


class Called:
    """One call of the model. Use it as a context: inside, a call that is not known can be recorded."""

    def __init__(self, tape: CallTape, args: Any, kwargs: Any, form: Hashable) -> None:
        """``form``: as ``form_of`` gives it."""
        self.tape = tape
        self._flat, self._structure = pytree.tree_flatten((args, kwargs))
        self._inputs = {f"input_{i}": i for i, value in enumerate(self._flat) if isinstance(value, Tensor)}
        self.leaves = {name: self._flat[place] for name, place in self._inputs.items()}  # by name of the input
        self._form, self._root = form, tape.roots.of(form)
        self._seen: dict[Call, list[tuple[int, Any]]] | None = {} if tape.watches(form) else None
        self._numbers = Numbers(tape.numbers, self._seen)
        self._own: dict[int, Tensor] = {}  # the script's tensor by the id of its fake
        self._outputs: list[Tensor] = []  # each once: returned, or in attributes
        self._given: dict[int, Any] = {}  # what the script got for the outputs
        self._constant_values: dict[int, Tensor] | None = None
        self._is_recorded = False
        self.has_left = False  # an error has left tensors of the call in attributes

    def __enter__(self) -> Called:
        tape = self.tape
        self._states = generators(tape.device)
        tape.mode.epoch += 1  # a known result must not keep the sizes that its numbers had
        self._symbols = Symbols(tape.shape_env)
        try:
            with tape.live as live:
                self._recorder = recorder = Recorder(live, self._symbols)
                recorder.fakes = recorder.modules.fakes = tape.fakes = tape.fakes or recorder.fakes
                recorder.numbers = self._numbers
                keys = _Keys(live, tape.contents, tape.origins.identity)
                self._reading = Reading(self._root, recorder, keys, tape.origins, {}, alone=not tape.num_runs)
                with self._closed_by_an_error():
                    self._run(live, recorder, keys, self._reading)
            with self._closed_by_an_error():
                views = {id(self._path[place].results[index]) for place, index in self._constants.views}
                in_attributes = {id(tensor) for _, tensor in self._kept.places}
                if in_attributes & views:
                    raise EffectError("the forward keeps a view of a tensor that is neither parameter nor buffer")
                fixed = self._fixed() if in_attributes & self._fixed_nodes.keys() else {}
                self._kept.replace({**fixed, **self._own})
        except BaseException:
            left = KeptTensors([module for _, module in modules_of(tape.model)])
            left.replace(self._own)
            self.has_left = bool(left.places)
            raise
        finally:
            set_generators(self._states, tape.device)
        return self

    @contextlib.contextmanager
    def _closed_by_an_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._close()
            raise

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._close()
        if kind is not None:
            return
        if self._seen is not None:
            self.tape.look(self._form, self._seen)
        self._give(self.tape.live)

    def _give(self, live: LiveModel) -> None:
        """Give the script its own tensors and constants where it has kept their fakes. The next call may read them.

        Raises: EffectError if it has kept another tensor, but for outputs.
        """
        assert self._ending is not None, "the call is known"
        returned = set(map(id, self._outputs))
        give_results(self._path, self._fixed, self._fixed_nodes.keys() - returned)
        if is_held(self._root.results, OWN):
            give(self._root.results, {number: own for number, own in self._own.items() if number not in returned})
        give_parameters(live.fake, self._own, (live.fake, live.of_real))
        refuse_kept(self._path, self._ending.of_torch, returned)

    def _fixed(self) -> dict[int, Tensor]:
        """Return the values of constants, by the id of the result."""
        if self._constant_values is None:
            self._constant_values = self._constants.values(self._fixed_nodes)
        return self._constant_values

    def _run(self, live: LiveModel, recorder: Recorder, keys: Keys, reading: Reading) -> None:
        tape, modules = self.tape, [module for _, module in live.modules]
        recorder.tape = reading
        numbers = NumbersOfCall(live, self.leaves, recorder, reading.record, self._states, tape.gather)
        recorder.reads = numbers
        recorder.answers.keep(numbers)
        tape.shape_env.around = lambda: recorder.modules.around
        with running(recorder, tape.mode, symbolic=False) as reads:
            arguments = list(self._flat)
            for name, fake in self._fakes(recorder, keys):
                arguments[self._inputs[name]] = fake
            args, kwargs = pytree.tree_unflatten(arguments, self._structure)
            # the recorder sees only autocast regions that begin while it listens
            with entered(autocast_now()), in_order(), unrecognized(tape.device), numbers.sizes_as_text():
                self._result = tape.model(*args, **kwargs)
            del args, kwargs, arguments
            refuse_registered(modules, {(id(registry), key) for registry, key, _ in live._registered_now})
            self._kept = KeptTensors(modules)
            self._own |= {id(live.of_real[id(tensor)]): tensor for _, _, tensor in live._registered_now}
            state = {id(live.of_real[id(tensor)]) for _, _, tensor in live._registered_now}
            leaves = [value for value in pytree.tree_leaves(self._result) if isinstance(value, FakeTensor)]
            outputs: list[Tensor] = [value for value in leaves if id(value) not in state]
            if not outputs:
                raise TraceError("the call of the model returns no tensor")
            bound = live.reassigned_buffers()
            self._end = (
                tuple(map(keys.of_tensor, outputs)),
                tuple((place, keys.of_tensor(value)) for place, value in self._kept.places),
                tuple((name, keys.of_tensor(value)) for name, value in bound.items()),
                tuple(live.new_parameters()),
            )
            _, known = reading.at.ends.get(self._end, (None, None))
            if known is not None and not tape.is_kept(known.stages):
                reading.record()
            reading.ended(self._end, (*outputs, *bound.values()))
            self._path = path_to(reading.at)
            if reading.records:
                recorder.tape = None
                self._check_settings(keys)
                self._constants = ConstantResults(recorder, self._path)
                self._copied = rebound.copy_into_buffers(recorder, live, outputs[0])
            else:
                self._ending: _Ending | None = reading.at.ends[self._end][1]
                self._constants = self._ending.constants
            self._fixed_nodes = self._constants.among(self._path)
            others = (self._own, self._fixed_nodes)
            places = self._kept.places
            in_attributes = [value for _, value in places if all(id(value) not in other for other in others)]
            self._outputs = list({id(value): value for value in (*outputs, *in_attributes)}.values())
            if reading.records:
                self._ending = None
                recorder.writer.set_output(tuple(self._outputs))
        self._reads_training = reads.seen
        self.leaves |= tensors_of(self._numbers.inputs.values(), self._numbers.all_values())

    def _check_settings(self, keys: Keys) -> None:
        """Refuse layers of torch whose settings the forward has changed after their call: stages get those of now."""
        for entry in self._path:
            layer = entry.key[0]
            if isinstance(layer, tuple) and layer[0] != "number":
                path = str(layer[0])
                if keys.of_module(path, self.tape.model.get_submodule(path)) != layer:
                    raise EffectError(
                        f"the forward changes the settings of {path} after it has called it",
                        where=where_text(entry.nodes[0]) if entry.nodes else "",
                        remedy="change them before the call",
                    )

    def _fakes(self, recorder: Recorder, keys: Keys) -> Iterator[tuple[str, Tensor]]:
        root = self._root
        with recorder.paused():
            if not root.results or is_held(root.results, OWN) or forms_of(root.results) != root.form:
                root.results = list(map(_like, self.leaves.values()))
                root.form = forms_of(root.results)
            keys.add(root.results)
            numbers = {n: self.tape.mode.from_tensor(t) for n, t in tensors_of(self.tape.numbers).items()}
        for name, number in numbers.items():
            recorder.writer.add_input(name, number)
        for index, (name, leaf) in enumerate(self.leaves.items()):
            fake = root.results[index]
            self._own[id(fake)] = leaf
            recorder.writer.add_input(name, fake)
            yield name, fake

    # --- what the stages run ------------------------------------------------------------------------------------------

    @property
    def stages(self) -> Any:
        """What runs a call that does the same; None if it is not known."""
        return None if self._ending is None else self._ending.stages

    def graph(self) -> Graph:
        """Return the graph of a call that is not known. Raises: TraceError if stages could not run it."""
        recorder, live = self._recorder, self.tape.live
        every = list(recorder.graph.nodes)
        for node in every:  # the script's generator moves by what nothing uses, too
            node.meta["keep"] = node.meta.get("keep") or bool(node.meta.get("random", (0, 0))[1])
        clean(recorder, live, self._copied, 1)
        self._refuse_changed_inputs(recorder)
        for node in set(every) - set(recorder.graph.nodes):
            node.meta.clear()  # it has its result
        rename(recorder.graph)
        followed = Followed(recorder, live, self._symbols, (), self._reads_training, None)
        return describe(followed, type(self.tape.model).__name__)

    def _refuse_changed_inputs(self, recorder: Recorder) -> None:
        """Refuse a forward that writes into an argument: the stages have copies, and the script its own tensor."""
        for node in recorder.graph.nodes:
            inputs = {entry.name for entry in node.meta.get("mutates", ()) if entry.meta.get("fresh")}
            if inputs:
                raise EffectError(
                    "the forward changes an argument in place, which is the script's tensor",
                    where=where_text(node.meta),
                    remedy="clone it in the forward first: x = x.clone()",
                )

    def recording(self, graph: Graph) -> Recording:
        """Return the recording of a call that is not known. ``graph``: as ``graph`` gives it."""
        recorder = self._recorder
        constants = dict(recorder.constants)
        module = assemble(self.tape.model, recorder.graph, constants)
        self._is_recorded = True
        for node in recorder.graph.nodes:
            node.meta.pop("changed", None)
            node.meta["val"] = pytree.tree_map_only(Tensor, self._copy, node.meta.get("val"))
        capture = Capture(graph, module, constants, "one call of the script", {}, "", ())
        memory = [value.untyped_storage()._cdata for value in self._outputs]
        shared = len(set(memory)) < len(memory) or any(name in self._inputs for name in graph.outputs)
        return Recording(capture, tuple(map(output_of, self._outputs)), constants, shared)

    def _copy(self, value: Tensor) -> Tensor:
        """Return another fake of the form of a result: that one serves later calls."""
        with self.tape.mode:
            return _like(value).requires_grad_(value.requires_grad)

    def accept(self, stages: Any) -> None:
        """Make the call a known one. ``stages``: what runs it."""
        self._ending = _Ending(stages, self._constants)
        self._reading.accept(self._end, [], self._ending)

    # --- the script's side --------------------------------------------------------------------------------------------

    def returned(self, values: list[Any]) -> Any:
        """Return what the call returns, with a value for each output, in the attributes that the forward sets, too."""
        self._given = {id(output): value for output, value in zip(self._outputs, values, strict=True)}
        every = {**self._own, **self._given}
        result = pytree.tree_map(
            lambda leaf: every.get(id(leaf), leaf) if isinstance(leaf, Tensor) else shown(leaf), self._result
        )
        self._kept.replace(self._given)
        self._result, self._outputs = None, []
        return result

    def check_kept(self) -> None:
        """Give the script the outputs that it has kept in other places, too. Raises: EffectError where that fails."""
        assert self._ending is not None, "the call is known"
        give_results(self._path, lambda: self._given, self._given.keys())
        refuse_kept(self._path, self._ending.of_torch)

    def plain_results(self) -> list[Any]:
        """Return what the call returns besides tensors."""
        return [leaf for leaf in pytree.tree_leaves(self._result) if not isinstance(leaf, Tensor)]

    def attribute_of_output(self) -> str:
        """Return the name of an attribute that the forward sets to a tensor; "" without one."""
        outputs = {id(output) for output in self._outputs}
        return next((name for (_, name, _), value in self._kept.places if id(value) in outputs), "")

    def _close(self) -> None:
        """Drop all references to results: a result that something else has is taken for one that the script keeps."""
        tape = self.tape
        tape.shape_env.around = tuple
        if not self._is_recorded:
            for node in self._recorder.graph.nodes:
                node.meta.clear()
        self._recorder.writer.known.clear()
        self._recorder.tape = self._recorder.reads = self._recorder.answers.reads = None
        self._reading.close()
        for entry in path_to(self._reading.at):
            entry.call = None  # it has its arguments
        del self._recorder, self._reading
        tape.memoized.forget()
        tape.num_runs += 1


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

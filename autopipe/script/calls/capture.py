"""Record one call of the script's model, cut it into stages with the planner, and write the stage files."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopipe.errors import ProfileError, TraceError
from autopipe.generate.parts import divide
from autopipe.generate.write import generate
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Device, Measurement, NodeCost, NodeWork, PassWork, Profile, WorkloadSpec
from autopipe.measure.estimate import estimate
from autopipe.planning.api import make_plan
from autopipe.planning.clusters import this_machine
from autopipe.planning.cut_mapping import map_cuts_to
from autopipe.planning.options import PlanOptions
from autopipe.script.calls.accesses import Accesses, Reads
from autopipe.script.calls.effects import Effects, computation, silent
from autopipe.script.calls.fingerprint import hooks_of
from autopipe.script.calls.outputs import Attribute, Output, bind_attributes, output_of, with_attributes
from autopipe.script.calls.parameter_uses import is_serial
from autopipe.script.devices import CPU, generators, set_generators
from autopipe.script.refusals import EffectError, UnsettledError
from autopipe.script.settings import autocast_now
from autopipe.trace.graph.describe import describe
from autopipe.trace.graph.replay import assemble
from autopipe.trace.record.follow import follow
from autopipe.trace.record.recorder import Recorder
from autopipe.trace.result import Capture


@dataclass(frozen=True)
class Recording:
    """One call as a capture."""

    capture: Capture
    inputs: dict[str, int]  # name of an input -> its place among the flat arguments
    outputs: tuple[Output, ...]  # the flat results, and what attributes are set to
    form: pytree.TreeSpec  # of the results
    attributes: tuple[Attribute, ...]  # that the forward sets
    reads: Reads  # the other attributes that it reads or sets
    constants: dict[str, Tensor]  # copies of the tensors that are neither parameter nor buffer, as recorded
    shared: bool  # whether two outputs, or an output and an input, share memory
    decided: bool  # whether decisions on numbers were recorded, with guards

    def returned(self, model: nn.Module, values: list[Any]) -> Any:
        """Return what the call returns, and set the attributes. ``values``: of the outputs."""
        bind_attributes(model, self.attributes, values)
        return pytree.tree_unflatten(values[: self.form.num_leaves], self.form)

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.capture.graph


class _Call:
    """What the tracer and the planner ask of a workload, from one call of the model."""

    spec = WorkloadSpec("script", arguments={}, hooks={}, inputs=(), seed=0)

    def __init__(self, leaves: dict[str, Tensor]) -> None:
        self.tensors = leaves

    def leaves(self, item: Any) -> dict[str, Tensor]:
        return dict(item)

    def with_leaves(self, item: Any, leaves: dict[str, Tensor]) -> Any:
        return dict(leaves)

    def batch_dims(self, item: Any) -> dict[str, int]:
        return {}

    def num_samples(self, item: Any) -> int:
        return 1

    def is_fixed(self, item: Any) -> bool:
        return True

    def example_item(self, count: int) -> Any:
        return self.tensors

    def optimizer(self, named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


def entered(regions: Sequence[Any]) -> contextlib.ExitStack:
    """Return a context in which the autocast regions of the script hold again."""
    stack = contextlib.ExitStack()
    for device, dtype, cache in regions:
        stack.enter_context(torch.autocast(device, dtype, True, cache))
    return stack


@contextlib.contextmanager
def _unrecognized(device: torch.device) -> Iterator[None]:
    """Hide from libraries that a call is recorded: Hugging Face's models choose attention with a mask then.

    Without one, a GPU uses another kernel, which rounds and draws in another way. On the CPU both give the same.
    """
    answers = {"is_compiling": lambda: False, "is_exporting": lambda: False}
    hidden: list[tuple[Any, dict[str, Any]]] = [
        (torch.compiler, answers),
        (torch._subclasses, {"FakeTensor": type("FakeTensor", (), {})}),
    ]
    with contextlib.ExitStack() as stack:
        for place, values in hidden if device != CPU else ():
            before = {name: getattr(place, name) for name in values}
            stack.callback(vars(place).update, before)
            vars(place).update(values)
        yield


def record(
    model: nn.Module, args: Any, kwargs: Any, settled: list[str] | None = None, device: torch.device = CPU
) -> Recording:
    """Record ``model(*args, **kwargs)`` at these shapes, in the grad mode and autocast region of this moment.

    ``settled``: the calls of a recording that ended with UnsettledError, if the attributes have been set since.
    ``device``: of the model.

    Raises: TraceError; UnsettledError if the forward sets attributes to constants.
    """
    hooked = hooks_of(model)
    if hooked:
        raise TraceError(f"{hooked} has hooks, which would run while the call is recorded and not later")
    recording, effects, calls = _recorded(model, args, kwargs, device, settled=settled is not None)
    if effects.kept:
        raise UnsettledError(calls)
    if settled is not None and calls != settled:
        raise TraceError("the forward computes in another way after it has set attributes of the model")
    return recording


def _recorded(
    model: nn.Module, args: Any, kwargs: Any, device: torch.device, *, settled: bool
) -> tuple[Recording, Effects, list[str]]:
    """Record once; return also what else the forward does, and its calls that depend on more than constants."""
    flat, form = pytree.tree_flatten((args, kwargs))
    places = {f"input_{i}": i for i, value in enumerate(flat) if isinstance(value, Tensor)}
    leaves = {name: flat[place].detach() for name, place in places.items()}
    call = _Call(leaves)
    results: dict[str, Any] = {}

    def forward(recorder: Recorder, item: Any) -> tuple[Any, None]:
        now = list(flat)
        for name, place in places.items():
            now[place] = item[name]
        again, keywords = pytree.tree_unflatten(now, form)
        effects, accesses = Effects(model, settled=settled), Accesses(model)
        # the recorder sees only autocast regions that begin while it listens
        with entered(autocast_now()), silent(), accesses.observed(), _unrecognized(device):
            output = model(*again, **keywords)
        effects.after(recorder, accesses)
        results["effects"], results["calls"] = effects, computation(recorder)
        outputs, results["form"] = pytree.tree_flatten(output)
        outputs, results["attributes"] = with_attributes(outputs, effects.sets)
        modules = list(map(id, model.modules()))
        results["reads"] = accesses.reads({(modules[number], name) for number, name in effects.sets})
        results["outputs"] = outputs
        tensors = tuple(value for value in outputs if isinstance(value, Tensor))
        if not tensors:
            raise TraceError("the call of the model returns no tensor")
        write = recorder.writer.set_output
        recorder.writer.set_output = lambda values: write(tensors)  # type: ignore[method-assign]
        return tensors[0], None

    states = generators(device)
    decided = False
    try:
        # sizes are numbers: a fixed count of samples makes the tracer leave out its symbols
        followed = follow(call, model, leaves, batch=1, forward=forward)  # type: ignore[arg-type]  # it has what is asked
    except EffectError:
        raise
    except TraceError:
        # a decision on numbers, such as on a mask that the model keeps, is recorded with a guard
        set_generators(states, device)
        followed = follow(call, model, leaves, forward=forward, answer=True)  # type: ignore[arg-type]
        decided = True
        if any(isinstance(part, nn.RNNBase) and part.training and part.dropout for part in model.modules()):
            raise  # the tracer does not see the draws of such a layer in this mode
    finally:
        set_generators(states, device)
    graph = describe(followed, type(model).__name__)
    constants = dict(followed.recorder.constants)
    capture = Capture(
        graph, assemble(model, followed.graph, constants), constants, "one call of the script", {}, "", ()
    )
    outputs = results["outputs"]
    memory = [value.untyped_storage()._cdata for value in outputs if isinstance(value, Tensor)]
    recording = Recording(
        capture,
        places,
        tuple(output_of(value) for value in outputs),
        results["form"],
        results["attributes"],
        results["reads"],
        {name: tensor.detach().clone() for name, tensor in constants.items()},
        len(set(memory)) < len(memory) or any(name in places for name in graph.outputs),
        decided,
    )
    return recording, results["effects"], results["calls"]


# seconds per operation, byte and kernel of a processor of today: only their ratio matters for the cut
_FLOP, _BYTE, _KERNEL = 1 / 2e10, 1 / 5e9, 1e-5


def plan_of(recording: Recording, count: int) -> Plan:
    """Return the planner's cut into ``count`` stages, with times from counted operations.

    Raises: PlanError if the model cannot be cut into as many.
    """
    leaves: dict[str, Tensor] = {
        node.name: node.meta["val"] for node in recording.capture.module.graph.nodes if node.op == "placeholder"
    }
    real = {
        name: torch.zeros(tuple(value.shape), dtype=value.dtype, device=CPU).as_strided(value.shape, value.stride())
        if value.is_contiguous()
        else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CPU)
        for name, value in leaves.items()
    }
    try:
        counted = estimate(recording.capture, _Call(real), microbatch_sizes=[1])
        measurement = _timed(counted.measurements[0])
    except ProfileError:  # a decision on numbers, which tensors without data do not have
        measurement = _by_bytes(recording.graph)
    profile = Profile(_Call.spec, recording.graph, Device("cpu", "counted", 0), (measurement,), batch_size=1)
    options = PlanOptions(num_ranks=count, batch_size=1, num_microbatches=1, recompute="never", exact_ties="always")
    return make_plan(profile, this_machine(count, profile.device, None), options)


def _by_bytes(graph: Graph) -> Measurement:
    """Return costs by the bytes of parameters and results alone."""
    costs = {}
    for node in graph.nodes:
        moved = sum(graph.parameters[name].num_bytes({}) for name in node.parameters)
        result = node.spec.num_bytes({}) if node.spec is not None else 0
        seconds = (moved + result) * _BYTE + _KERNEL
        costs[node.name] = NodeCost(seconds, 2 * seconds, result, result)
    return Measurement(1, costs)


def _timed(measurement: Measurement) -> Measurement:
    def seconds(work: PassWork) -> float:
        return work.flops * _FLOP + (work.matrix_bytes + work.other_bytes) * _BYTE + work.kernels * _KERNEL

    costs = {}
    for name, cost in measurement.costs.items():
        work = measurement.work.get(name, NodeWork())
        costs[name] = dataclasses.replace(
            cost, forward_seconds=seconds(work.forward), backward_seconds=seconds(work.backward)
        )
    return dataclasses.replace(measurement, costs=costs)


@dataclass(frozen=True)
class Draw:
    """A call that draws random numbers: its stage and its node."""

    stage: int
    node: fx.Node


@dataclass(frozen=True)
class Program:
    """A recording cut into stages, whose files are written."""

    number: int
    recording: Recording
    plan: Plan
    folder: str  # of the stage files, inside the folder of the run
    draws: tuple[Draw, ...]  # in the order of the forward
    buffers_written: frozenset[str]
    serial: bool  # see ``uses``

    def forms(self, model: nn.Module, names: dict[int, str]) -> list[dict[str, Any]]:
        """Return what each rank gets of the program, without tensors. ``names``: as for ``module_form``.

        Raises: UnsendableError if a stage calls a module that is not torch's.
        """
        from autopipe.script.codec import attributes_of, module_form

        graph, plan = self.recording.graph, self.plan
        crossings = [
            (
                index,
                b.value,
                b.producer,
                b.consumers,
                b.spec.concrete({}),
                getattr(torch, b.spec.dtype),
                b.spec.requires_grad,
            )
            for index, b in enumerate(plan.boundaries)
        ]
        forms = []
        for part in divide(graph, plan):
            modules = {path: module_form(model.get_submodule(path), names) for path in part.modules}
            inside = {
                (path, below): attributes_of(module)
                for path in part.modules
                for below, module in model.get_submodule(path).named_modules()
            }
            forms.append(
                {
                    "number": self.number,
                    "folder": self.folder,
                    "graph": graph.digest,
                    "plan": plan.digest,
                    "sends": [entry for entry in crossings if entry[2] == part.index],
                    "receives": [entry for entry in crossings if part.index in entry[3]],
                    "modules": modules,
                    "attributes": inside,
                    "names": {name: graph.aliases.get(name, name) for name in (*part.parameters, *part.buffers)},
                    "reads": sorted(
                        {
                            *plan.stages[part.index].parameters,
                            *(
                                n
                                for node in part.nodes
                                for n in (*node.parameters, *node.buffers, *node.buffers_written)
                            ),
                            *(graph.aliases.get(name, name) for name in (*part.parameters, *part.buffers)),
                        }
                    ),
                }
            )
        return forms


def program_of(recording: Recording, number: int, plan: Plan, folder: Path) -> Program:
    """Write the stage files of a recording into ``folder``, and return the program.

    Raises: TraceError, ArtifactError.
    """
    name = f"call_{number}"
    generate(recording.capture, plan, folder / name, of_a_call=True)
    graph = recording.graph
    stage_of = {node.name: stage.index for stage in plan.stages for node in graph.nodes[stage.start : stage.stop]}
    draws = tuple(
        Draw(stage_of[node.name], node)
        for node in recording.capture.module.graph.nodes
        if node.name in stage_of and node.meta.get("random", (0, 0))[1]
    )
    _refuse_host_values(recording, plan)
    for draw in draws:
        if _draws_by_values(draw.node, recording):
            raise TraceError(f"{draw.node.name} draws as many random numbers as its values demand")
    written = frozenset(buffer for node in graph.nodes for buffer in node.buffers_written)
    return Program(number, recording, plan, name, draws, written, is_serial(graph, plan))


def _refuse_host_values(recording: Recording, plan: Plan) -> None:
    """Refuse values on the host that would cross between stages on GPUs: they would arrive on the device."""
    crossing = {boundary.value for boundary in plan.boundaries}
    values = {
        node.name: node.meta["val"].device.type
        for node in recording.capture.module.graph.nodes
        if isinstance(node.meta.get("val"), Tensor)
    }
    kinds = set(values.values()) - {CPU.type}
    for name in sorted(crossing & values.keys()):
        if kinds and values[name] == CPU.type:
            raise TraceError(f"{name} is on the CPU, in a forward on {kinds.pop()}, and would cross between stages")


# how many numbers these consume depends on their input: the script's generator could not follow
_BY_VALUES = {"poisson", "binomial", "rrelu", "rrelu_", "_standard_gamma", "standard_gamma", "_sample_dirichlet"}


def _draws_by_values(node: fx.Node, recording: Recording) -> bool:
    if node.op == "call_module":
        return isinstance(recording.capture.module.get_submodule(str(node.target)), nn.RReLU)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return str(name).removesuffix(".default") in _BY_VALUES


def remapped(first: Recording, plan: Plan, recording: Recording) -> Plan:
    """Return the plan of another recording whose stages have the parameters of the first plan's.

    Raises: PlanError.
    """
    return map_cuts_to(plan, first.graph, recording.graph, all_connected=True)

"""``Part``: the contents of one stage: its calls, the values that it receives and sends, and the state it adopts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, fx

from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph, Node
from autopipe.ir.plan import Boundary, Plan, Stage
from autopipe.ir.teams.axes import Shard


class Captured(Protocol):
    """The part of a ``Capture`` that is generated; see ``autopipe.trace``."""

    @property
    def graph(self) -> Graph:
        """The calls, in the form that is planned and stored."""

    @property
    def module(self) -> fx.GraphModule:
        """The calls as ``torch.fx`` nodes."""

    @property
    def constants(self) -> dict[str, Tensor]:
        """Tensors that the forward reads and that are neither parameters nor buffers."""

    @property
    def evaluation(self) -> Mapping[str, tuple[tuple[object, ...], dict[str, object]]]:
        """By node, its arguments in evaluation mode where they differ."""

    @property
    def evaluation_note(self) -> str:
        """The reason why evaluation cannot use this graph, or ""."""

    @property
    def team(self) -> int:
        """How many members run each stage together."""

    @property
    def shards(self) -> Mapping[str, Shard]:
        """How the state of the model is cut over the members."""

    @property
    def partial(self) -> tuple[str, ...]:
        """Complete parameters whose gradients are summed over the members."""

    @property
    def divisor(self) -> CapturedDivisor | None:
        """The divisor of the loss; None if it is the number of samples."""


class CapturedDivisor(Protocol):
    """The part of a divisor that is generated; see ``autopipe.trace.loss.divisor``."""

    @property
    def graph(self) -> Graph:
        """The calls, in the form that is planned and stored."""

    @property
    def module(self) -> fx.GraphModule:
        """The calls as ``torch.fx`` nodes."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """One value for each term of the loss, "" for 1."""

    @property
    def constants(self) -> dict[str, Tensor]:
        """Tensors that it reads in addition to the batch."""

    @property
    def penalty(self) -> bool:
        """Whether a term of the loss does not depend on the batch."""

    @property
    def text(self) -> str:
        """A description of the divisor in words."""


@dataclass(frozen=True, slots=True)
class Part:
    """One stage. Values have their names in the graph; modules and tensors have their paths in the model."""

    index: int
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]  # tensors of the batch
    receives: tuple[Boundary, ...]
    sends: tuple[Boundary, ...]
    returns: tuple[str, ...]  # the outputs of the graph, in the last stage
    modules: tuple[str, ...]  # adopted as they are
    spare: tuple[str, ...]  # modules that only the code for batches of another form may call
    parameters: tuple[str, ...]  # adopted one by one: in no adopted module
    buffers: tuple[str, ...]  # likewise
    constants: tuple[str, ...]
    num_parameters: int
    num_elements: int  # of all parameters
    units: Mapping[str, int]  # by value, the number of the recompute unit that computes it


def divide(graph: Graph, plan: Plan) -> list[Part]:
    """Return the stages of a plan. Together they have every parameter and buffer of the model, under every name."""
    cuts = Cuts(graph)
    last = len(plan.stages) - 1
    nodes = [
        cuts.stage_nodes(stage.start, stage.stop, graph.outputs if stage.index == last else ()) for stage in plan.stages
    ]
    buffers = [dict.fromkeys(b for n in stage for b in (*n.buffers, *n.buffers_written)) for stage in nodes]
    homes = {name: stage.index for stage in plan.stages for name in stage.buffers}
    for name in graph.buffers:
        if not any(name in own for own in buffers):
            buffers[homes[name] if name in homes else _nearest(name, nodes)][name] = None
    return [_part(graph, plan, index, nodes[index], tuple(buffers[index])) for index in range(last + 1)]


def inputs_of_stages(graph: Graph, plan: Plan) -> list[tuple[str, ...]]:
    """Return, for each stage, the tensors of a batch that it reads: ``INPUTS`` of its stage file."""
    return [part.inputs for part in divide(graph, plan)]


def _part(graph: Graph, plan: Plan, index: int, nodes: tuple[Node, ...], buffers: tuple[str, ...]) -> Part:
    returns = graph.outputs if index == len(plan.stages) - 1 else ()
    read = {value for node in nodes for value in node.inputs} | set(returns)
    called = dict.fromkeys(node.target for node in nodes if node.kind == "call_module")
    modules = _outside(tuple(called), list(called))
    parameters = dict.fromkeys((*plan.stages[index].parameters, *(p for node in nodes for p in node.parameters)))
    spare = _unused_modules(graph, {*parameters, *buffers}, called)
    adopted = (*modules, *spare)
    elements = 0
    for name in parameters:
        count = 1
        for size in graph.parameters[name].shape:
            count *= int(size)
        elements += count
    return Part(
        index=index,
        nodes=nodes,
        inputs=tuple(entry.name for entry in graph.inputs if entry.name in read),
        receives=tuple(boundary for boundary in plan.boundaries if index in boundary.consumers),
        sends=tuple(boundary for boundary in plan.boundaries if boundary.producer == index),
        returns=returns,
        modules=modules,
        spare=spare,
        parameters=_outside(adopted, _all_names(graph, parameters, graph.parameters)),
        buffers=_outside(adopted, _all_names(graph, dict.fromkeys(buffers), graph.buffers)),
        constants=tuple(dict.fromkeys(name for node in nodes for name in node.constants)),
        num_parameters=len(parameters),
        num_elements=elements,
        units=_units(graph, plan.stages[index], nodes),
    )


def _units(graph: Graph, stage: Stage, nodes: tuple[Node, ...]) -> dict[str, int]:
    """Return the unit of every node that is recomputed by block."""
    # sizes of the batch are written before all other calls
    own, inputs = {node.name for node in nodes}, {entry.name for entry in graph.inputs}
    return {
        node.name: number
        for number, (start, stop) in enumerate(stage.units)
        for node in graph.nodes[start:stop]
        if node.name in own and not (node.target == "size" and inputs.issuperset(node.inputs))
    }


def _unused_modules(graph: Graph, own: Collection[str], called: Collection[str]) -> tuple[str, ...]:
    """Return the outermost modules whose state belongs to this stage alone and is read by no node of the graph."""
    state = (*graph.parameters, *graph.buffers, *graph.aliases)
    read = {name for node in graph.nodes for name in (*node.parameters, *node.buffers, *node.buffers_written)}
    kept = {name for name in state if graph.aliases.get(name, name) in own}
    unused = {name for name in kept if graph.aliases.get(name, name) not in read}
    paths: list[str] = []
    for path in sorted({name.rpartition(".")[0] for name in unused} - {""}):
        inside = {name for name in state if name.startswith(f"{path}.")}
        nested = path.startswith(tuple(f"{outer}." for outer in (*paths, *called)))
        if inside <= unused and not nested and not any(f"{call}.".startswith(f"{path}.") for call in called):
            paths.append(path)
    return tuple(paths)


def _all_names(graph: Graph, own: Mapping[str, None], order: Mapping[str, object]) -> list[str]:
    """Return every name of the tensors of a stage, in the order of the model, aliases last."""
    names = [name for name in order if name in own]
    return names + [other for other, first in graph.aliases.items() if first in own]


def _outside(modules: tuple[str, ...], names: list[str]) -> tuple[str, ...]:
    """Return the names that are not inside any of the modules."""
    inside = tuple(f"{path}." for path in modules)
    return tuple(name for name in names if not name.startswith(inside))


def _nearest(name: str, nodes: list[tuple[Node, ...]]) -> int:
    """Return the stage for a buffer that no node reads: the stage whose modules share the longest path with it."""
    path = name.split(".")

    def shared(other: str) -> int:
        count = 0
        for a, b in zip(path, other.split("."), strict=False):
            if a != b:
                break
            count += 1
        return count

    best = [max((shared(node.module_path) for node in stage), default=0) for stage in nodes]
    return best.index(max(best))

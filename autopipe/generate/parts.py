"""What one stage consists of: the calls it runs, what comes in and goes out, and the state that it adopts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, fx

from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph, Node
from autopipe.ir.plan import Boundary, Plan


class Captured(Protocol):
    """What is needed of a ``Capture``; see ``autopipe.trace``."""

    @property
    def graph(self) -> Graph:
        """The calls as data."""

    @property
    def module(self) -> fx.GraphModule:
        """The same calls as ``torch.fx`` has them."""

    @property
    def constants(self) -> dict[str, Tensor]:
        """Tensors that are neither parameter nor buffer."""

    @property
    def evaluation(self) -> Mapping[str, tuple[tuple[object, ...], dict[str, object]]]:
        """Arguments in evaluation mode, where they differ."""

    @property
    def evaluation_note(self) -> str:
        """Why evaluation cannot use this graph, or ""."""

    @property
    def divisor(self) -> CapturedDivisor | None:
        """What the loss divides by, None where it is the number of samples."""


class CapturedDivisor(Protocol):
    """What is needed of a divisor; see ``autopipe.trace.loss.divisor``."""

    @property
    def graph(self) -> Graph:
        """The calls as data."""

    @property
    def module(self) -> fx.GraphModule:
        """The same calls as ``torch.fx`` has them."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """One value for each term of the loss, "" for 1."""

    @property
    def constants(self) -> dict[str, Tensor]:
        """Tensors that it reads beside the batch."""

    @property
    def penalty(self) -> bool:
        """Whether a term of the loss does not depend on the batch."""

    @property
    def text(self) -> str:
        """A readable description."""


@dataclass(frozen=True, slots=True)
class Part:
    """One stage. Names of values are those of the graph; paths are those of the model.

    ``spare``: modules of the stage that nothing calls here, and that the code for batches of another form may call.
    """

    index: int
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    receives: tuple[Boundary, ...]
    sends: tuple[Boundary, ...]
    returns: tuple[str, ...]
    modules: tuple[str, ...]
    spare: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[str, ...]
    num_parameters: int
    num_elements: int


def divide(graph: Graph, plan: Plan) -> list[Part]:
    """Return the stages of a plan. Together they hold every parameter and buffer of the model, under every name."""
    cuts = Cuts(graph)
    last = len(plan.stages) - 1
    nodes = [
        cuts.stage_nodes(stage.start, stage.stop, graph.outputs if stage.index == last else ()) for stage in plan.stages
    ]
    buffers = [dict.fromkeys(b for n in found for b in (*n.buffers, *n.buffers_written)) for found in nodes]
    homes = {name: stage.index for stage in plan.stages for name in stage.buffers}
    for name in graph.buffers:
        if not any(name in held for held in buffers):
            buffers[homes[name] if name in homes else _nearest(name, nodes)][name] = None
    return [_part(graph, plan, index, nodes[index], tuple(buffers[index])) for index in range(last + 1)]


def inputs_of_stages(graph: Graph, plan: Plan) -> list[tuple[str, ...]]:
    """Return, by stage, the names of the tensors of a batch that it reads: ``INPUTS`` of its stage file."""
    return [part.inputs for part in divide(graph, plan)]


def _part(graph: Graph, plan: Plan, index: int, nodes: tuple[Node, ...], buffers: tuple[str, ...]) -> Part:
    returns = graph.outputs if index == len(plan.stages) - 1 else ()
    read = {value for node in nodes for value in node.inputs} | set(returns)
    called = dict.fromkeys(node.target for node in nodes if node.kind == "call_module")
    modules = _beside(tuple(called), list(called))
    held = dict.fromkeys((*plan.stages[index].parameters, *(p for node in nodes for p in node.parameters)))
    spare = _unused_modules(graph, {*held, *buffers}, called)
    whole = (*modules, *spare)
    elements = 0
    for name in held:
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
        parameters=_beside(whole, _all_names(graph, held, graph.parameters)),
        buffers=_beside(whole, _all_names(graph, dict.fromkeys(buffers), graph.buffers)),
        constants=tuple(dict.fromkeys(name for node in nodes for name in node.constants)),
        num_parameters=len(held),
        num_elements=elements,
    )


def _unused_modules(graph: Graph, held: Collection[str], called: Collection[str]) -> tuple[str, ...]:
    """Return the outermost modules that no node of the graph reads anything of, and all of whose state is held here."""
    state = (*graph.parameters, *graph.buffers, *graph.aliases)
    read = {name for node in graph.nodes for name in (*node.parameters, *node.buffers, *node.buffers_written)}
    kept = {name for name in state if graph.aliases.get(name, name) in held}
    unused = {name for name in kept if graph.aliases.get(name, name) not in read}
    found: list[str] = []
    for path in sorted({name.rpartition(".")[0] for name in unused} - {""}):
        inside = {name for name in state if name.startswith(f"{path}.")}
        nested = path.startswith(tuple(f"{outer}." for outer in (*found, *called)))
        if inside <= unused and not nested and not any(f"{call}.".startswith(f"{path}.") for call in called):
            found.append(path)
    return tuple(found)


def _all_names(graph: Graph, held: Mapping[str, None], order: Mapping[str, object]) -> list[str]:
    """Return every name of what a stage holds, in the order of the model."""
    found = [name for name in order if name in held]
    return found + [other for other, first in graph.aliases.items() if first in held]


def _beside(modules: tuple[str, ...], names: list[str]) -> tuple[str, ...]:
    """Return the names that no adopted module brings along."""
    inside = tuple(f"{path}." for path in modules)
    return tuple(name for name in names if not name.startswith(inside))


def _nearest(name: str, nodes: list[tuple[Node, ...]]) -> int:
    """Return the stage that runs most of the way to a buffer that nobody reads."""
    path = name.split(".")

    def shared(other: str) -> int:
        count = 0
        for a, b in zip(path, other.split("."), strict=False):
            if a != b:
                break
            count += 1
        return count

    best = [max((shared(node.module_path) for node in found), default=0) for found in nodes]
    return best.index(max(best))

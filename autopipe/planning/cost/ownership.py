"""Assigns every parameter and buffer of the model to stages, by name.

State that nodes read belongs to the stages of those nodes. State that no node reads, such as a head that the loss
ignores, must still be in the checkpoint. It is assigned to the first reader of the state with the longest common module
path, or to the last stage if no path has a common part. State that only batches of another form read is assigned to the
stage where those batches need it (``Graph.homes``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autopipe.errors import PlanError
from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Stage, Tie

State = tuple[tuple[str, ...], tuple[str, ...]]
"""The names of a stage's parameters and of its buffers."""


def unused_state(graph: Graph) -> dict[str, int]:
    """Return, for every parameter and buffer that no node reads, the position of the node to whose stage it belongs."""
    first_reader: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        for name in (*node.parameters, *node.buffers, *node.buffers_written):
            first_reader.setdefault(name, index)
    work = [index for index, node in enumerate(graph.nodes) if not node.input_only]
    by_path: dict[tuple[str, ...], int] = {}
    for name, reader in first_reader.items():
        path = tuple(name.split(".")[:-1])
        place = reader if not graph.nodes[reader].input_only else _next_work(work, reader)
        for length in range(1, len(path) + 1):
            by_path.setdefault(path[:length], place)
    homes = {}
    for name in (*graph.parameters, *graph.buffers):
        if name not in first_reader and name in graph.homes:
            home = graph.position[graph.homes[name]]
            homes[name] = _next_work(work, home) if graph.nodes[home].input_only else home
        elif name not in first_reader:
            path = tuple(name.split(".")[:-1])
            prefixes = (path[:length] for length in range(len(path), 0, -1))
            homes[name] = next((by_path[p] for p in prefixes if p in by_path), len(graph.nodes) - 1)
    return homes


def _next_work(work: Sequence[int], position: int) -> int:
    return next((index for index in work if index >= position), work[-1] if work else position)


def state_of_stages(graph: Graph, cuts: Cuts, positions: Sequence[int]) -> list[State]:
    """Return (parameters, buffers) of every stage, each in the model's order, with those that no node reads."""
    edges = [0, *positions, len(graph.nodes)]
    unused = unused_state(graph)
    stages = []
    for start, stop in itertools.pairwise(edges):
        outputs = graph.outputs if stop == edges[-1] else ()
        present: set[str] = {name for name, home in unused.items() if start <= home < stop}
        for node in cuts.stage_nodes(start, stop, outputs):
            present.update((*node.parameters, *node.buffers, *node.buffers_written))
        stages.append(
            (
                tuple(name for name in graph.parameters if name in present),
                tuple(n for n in graph.buffers if n in present),
            )
        )
    return stages


def find_ties(
    graph: Graph, stages: Sequence[Sequence[str]], exchanged_bytes: int, batch_size: int, exact_ties: str = "auto"
) -> tuple[Tie, ...]:
    """Return the parameters that several stages use. The first of the stages owns the parameter.

    A tie is ``exact`` if the parameter is at most as large as the values that the stages exchange per microbatch
    (``exchanged_bytes``). Its gradient is then sent with every microbatch, in the order of plain autograd. With
    ``exact_ties`` "always", its size does not matter. A frozen parameter has no gradient, and is always exact.
    """
    sizes = graph.sizes(batch_size)
    ties = []
    for name, spec in graph.parameters.items():
        users = [index for index, parameters in enumerate(stages) if name in parameters]
        if len(users) > 1:
            small = spec.num_bytes(sizes) <= exchanged_bytes
            exact = exact_ties == "always" or not spec.requires_grad or small
            ties.append(Tie(name, users[0], tuple(users[1:]), exact))
    return tuple(ties)


def check_every_parameter(graph: Graph, stages: Sequence[Stage]) -> None:
    """Check that the stages' parameters together are those of the model.

    Raises: PlanError with the first name that is missing or unknown, and their number.
    """
    present = {name for stage in stages for name in stage.parameters}
    for kind, names in (
        ("in no stage", [name for name in graph.parameters if name not in present]),
        ("in a stage but not in the model", sorted(present - set(graph.parameters))),
    ):
        if names:
            raise PlanError(
                f"parameter {names[0]!r} is {kind} ({len(names)} of {len(graph.parameters)} parameters)",
                where=f"plan of {graph.name}",
                remedy="make the plan again from this model's profile",
            )

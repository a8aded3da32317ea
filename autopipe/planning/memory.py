"""What a stage keeps on each of its ranks, in symbols and in bytes.

With v weight versions and at most k microbatches in flight::

    state        = v W + G + O             W weights and buffers, G gradients, O optimizer state
    peak         = state + k (A + K) + X   A saved for backward, K batch tensors, received values, input-only results
    with recompute
    peak         = state + k K + A + X     only the inputs of the stage are kept; one microbatch's A lives at a time
    where the backward is split, on stage s > 0
    peak         = the same + (s + 1) H    H the gradients between the halves: as large as what has weights to train
    X            = max(0, max_x (w_x - A behind x))   w workspace of a node; what is behind it is freed by then

What follows the schedule (``workflow.peaks``) knows more, and has in place of X::

    X'           = max(0, max_x (w_x + g_x - A behind x))   g gradients that wait for x: of what is read behind it, too
    Y            = max(0, max_x (w_x + g_x - H up to x))    where the backward is split: its first half frees nothing

G counts trained parameters only, O only those that the stage itself steps. A profile counts a tensor at the first node
that keeps it. A stage that has the tensor from elsewhere counts it in K and not in A; one that sends it counts it in A
in any case, as its backward starts from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph, Node
from autopipe.ir.profile import Measurement
from autopipe.planning.options import ScheduleNeeds
from autopipe.planning.ownership import State
from autopipe.planning.tables import Array, Tables

GIB = 2**30


def gib(num_bytes: float) -> str:
    """Return bytes for people: GiB to three digits, small ones in MiB or KiB."""
    value = num_bytes / GIB
    if value < 0.01:
        return f"{value * 2**10:.3g} MiB" if value * 2**10 >= 0.01 else f"{value * 2**20:.3g} KiB"
    return f"{value:,.0f} GiB" if value >= 1000 else f"{value:.3g} GiB"


def in_flight(needs: ScheduleNeeds, num_microbatches: int, *, behind: int, num_ranks: int, replicas: int = 1) -> int:
    """Return how many microbatches a rank of a stage holds at most. ``behind``: the ranks of all later stages."""
    share = math.ceil(num_microbatches / replicas)
    if needs.in_flight == "all":
        return share
    if needs.in_flight == "ranks":
        return min(share, math.ceil(num_ranks / replicas))
    depth = math.ceil(needs.depth * behind / replicas) + 1
    return min(depth, share) if needs.flush else depth


def in_flight_of_interleaved(stages_per_rank: int, num_ranks: int, num_microbatches: int, stage: int) -> int:
    """Return how many microbatches an interleaved stage holds at most; stage s is on rank ``s mod num_ranks``.

    A rank takes c microbatches at a time through each of its v stages, and sends 2(p-1-r) + (v-1)c forwards ahead
    (arXiv:2104.04473, section 2.2); in steady state each further forward is followed by a backward. A stage holds most
    when its first backward is about to run, behind c of each later stage of its rank.
    """
    v, (chunk, rank) = stages_per_rank, divmod(stage, num_ranks)
    c = num_microbatches // max(num_microbatches // num_ranks, 1)
    done = (v - 1) * c + 2 * (num_ranks - 1 - rank) + 1 + (v - 1 - chunk) * c
    rounds, rest = divmod(done, v * c)
    return min(num_microbatches, rounds * c + min(max(rest - chunk * c, 0), c))


def weight_versions(needs: ScheduleNeeds, num_microbatches: int, held: int, replicas: int = 1) -> int:
    """Return how many versions of its weights a stage keeps when ``held`` microbatches are in flight on each rank."""
    fixed = needs.fixed_versions(num_microbatches)
    if fixed is not None:
        return fixed
    return 1 + math.ceil((held - 1) * replicas / num_microbatches)


def peak_tables(
    tables: Tables, optimizer_bytes_per_byte: float, held: int, versions: int, waiting: int = 0
) -> tuple[Array, Array]:
    """Return the peak bytes of every stage (i, j) without and with recompute. ``waiting``: halves of a backward."""
    state = versions * tables.weight_bytes + tables.gradient_bytes + optimizer_bytes_per_byte * tables.stepped_bytes
    kept = state + held * tables.kept_bytes + tables.workspace_bytes + waiting * tables.between_bytes
    return kept + held * tables.saved_bytes, kept + tables.saved_bytes


@dataclass(frozen=True, slots=True)
class StageBytes:
    """The terms of the module's formula for one stage. ``stepped``: bytes of the parameters that it steps itself.

    ``workspace_whole``, ``workspace_half``: X' and Y.
    """

    weights: int
    gradients: int
    optimizer: int
    stepped: int
    saved: int
    kept: int
    workspace: int
    between: int
    workspace_whole: int
    workspace_half: int

    def peak(self, held: int, versions: int, recompute: bool, waiting: int = 0) -> int:
        """Return the peak with ``held`` microbatches in flight; ``waiting``: halves of a backward."""
        state = versions * self.weights + self.gradients + self.optimizer
        return (
            state + held * self.kept + (1 if recompute else held) * self.saved + self.workspace + waiting * self.between
        )


def recount(
    graph: Graph,
    cuts: Cuts,
    measurement: Measurement,
    *,
    optimizer_bytes_per_byte: float,
    edges: tuple[int, ...],
    index: int,
    state: list[State],
) -> StageBytes:
    """Count stage ``index`` of the plan with these edges anew, node by node, sharing nothing with the search's tables.

    ``state``: (parameters, buffers) of every stage.
    """
    sizes, costs = graph.sizes(measurement.microbatch_size), measurement.costs
    start, stop = edges[index], edges[index + 1]
    last = stop == len(graph.nodes)
    nodes = cuts.stage_nodes(start, stop, graph.outputs if last else ())
    by_name = {node.name: node for node in graph.nodes}
    inputs = {entry.name: entry.spec.num_bytes(sizes) for entry in graph.inputs}
    read = dict.fromkeys(value for node in nodes for value in node.inputs)
    if last:
        read.update(dict.fromkeys(graph.outputs))
    kept = 0
    for value in read:
        node = by_name.get(value)
        if node is None:
            kept += inputs[value]
        elif not node.input_only and graph.position[value] < start and node.spec is not None:
            kept += node.spec.num_bytes(sizes)
    kept += sum(costs[node.name].output_bytes for node in nodes if node.input_only and not node.storage)
    copied = [node.name for node in nodes if node.input_only]
    saved = _corrections(graph, measurement, start, stop, {*read, *copied})
    work = [node for node in nodes if not node.input_only]
    waiting = _waiting_gradients(graph, sizes, work)
    between = sum(costs[node.name].output_bytes for node in work if _trains(graph, node))
    workspace = whole = half = behind = 0
    noted = between
    for node in reversed(work):
        own, waits = costs[node.name].workspace_bytes, waiting[node.name]
        workspace, whole = max(workspace, own - behind), max(whole, own + waits - behind)
        half = max(half, own + waits - noted)
        behind += costs[node.name].saved_bytes
        noted -= costs[node.name].output_bytes if _trains(graph, node) else 0
    parameters, buffers = state[index]
    earlier = {name for names, _ in state[:index] for name in names}
    trained = {
        name: graph.parameters[name].num_bytes(sizes) for name in parameters if graph.parameters[name].requires_grad
    }
    weights = sum(graph.parameters[name].num_bytes(sizes) for name in parameters)
    weights += sum(graph.buffers[name].num_bytes(sizes) for name in buffers)
    stepped = sum(size for name, size in trained.items() if name not in earlier)
    optimizer = math.ceil(optimizer_bytes_per_byte * stepped)
    return StageBytes(
        weights,
        sum(trained.values()),
        optimizer,
        stepped,
        max(saved + behind, 0),
        kept,
        workspace,
        between,
        whole,
        half,
    )


def _trains(graph: Graph, node: Node) -> bool:
    return any(graph.parameters[name].requires_grad for name in node.parameters)


def _waiting_gradients(graph: Graph, sizes: Mapping[str, int], work: Sequence[Node]) -> dict[str, int]:
    """Return for each node the bytes of gradients that are there before its backward, its own result's aside.

    They are those of values made before it and read behind it; a gradient that another stage sent is a message.
    """
    specs = {node.name: node.spec for node in graph.nodes if not node.input_only}
    first = {node.name: place for place, node in enumerate(work)}
    last = {value: place for place, node in enumerate(work) for value in node.inputs}
    found = dict.fromkeys(first, 0)
    for value, end in last.items():
        spec = specs.get(value)
        if spec is not None and spec.requires_grad:
            for node in work[first.get(value, -1) + 1 : end]:
                found[node.name] += spec.num_bytes(sizes)
    return found


def _corrections(graph: Graph, measurement: Measurement, start: int, stop: int, has: Iterable[str]) -> int:
    """Return what to add to what the nodes of a stage save: see ``tables``, of which nothing is used here.

    ``has``: all that the stage reads, or computes from its inputs alone.
    """
    sizes, position = graph.sizes(measurement.microbatch_size), graph.position
    num_bytes = {entry.name: entry.spec.num_bytes(sizes) for entry in graph.inputs}
    for node in graph.nodes:
        if node.input_only:
            num_bytes[node.name] = 0 if node.storage else measurement.costs[node.name].output_bytes
        elif node.spec is not None:
            num_bytes[node.name] = node.spec.num_bytes(sizes)
    work = {node.name for node in graph.nodes if not node.input_only}
    kept_at = {value: position[keeper] for value, keeper in measurement.keepers.items()}
    total = 0
    for value in has:
        from_elsewhere = value not in work or position[value] < start
        if from_elsewhere and start <= kept_at.get(value, -1) < stop:
            total -= num_bytes.get(value, 0)
    behind = {value for node in graph.nodes[stop:] if not node.input_only for value in node.inputs}
    if stop < len(graph.nodes):
        behind.update(graph.outputs)
    for node in graph.nodes[start:stop]:
        if node.name in work & behind and node.spec is not None and node.spec.requires_grad:
            total += num_bytes[node.name] if kept_at.get(node.name, stop) >= stop else 0
    return total

"""``Atoms``: a graph divided at its legal cuts, and which atoms read which value.

The legal cuts divide a graph into ``n`` *atoms*; a stage is a run of atoms ``i..j-1``.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph, Node
from autopipe.ir.profile import Measurement, NodeCost

# The recompute units of a graph: the parts of a stage that recompute by block runs again, one at a time.
#
# A unit is a run of atoms, so what enters and leaves it are whole tensors, and no memory that crosses its edges changes
# in place behind it. A stage that ends inside a unit has a part of it, which is a unit of that stage. The units are
#
# 1. the user's own calls of ``torch.utils.checkpoint``, if the model has any;
# 2. or the repeated blocks of the model: children of one container with numbers as names (``h.0``, ``h.1``, ...), and
#    what lies between them. Of nested containers, those that need less memory;
# 3. or runs of about equal size, between atoms where few bytes cross. About sqrt(n) of them need the least memory:
#    Chen, Xu, Zhang, Guestrin 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174, section 4).
#
# The memory compared in 2 and 3 is that of one microbatch: the bytes that cross the edges of the units, and the largest
# unit.

Span = tuple[int, int]
"""Atoms ``first`` to ``stop - 1``."""
_MOST_RUNS = 64  # units of equal size that are tried


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a graph."""

    spans: tuple[Span, ...]  # ascending, without overlap; empty: the graph cannot be recomputed by block
    of_user: bool = False  # the user's calls of checkpoint(), and not blocks that the planner chose

    def starts(self, num_atoms: int) -> list[int]:
        """Return, for every atom, the first atom of its unit; -1 outside of all units."""
        starts = [-1] * num_atoms
        for first, stop in self.spans:
            starts[first:stop] = [first] * (stop - first)
        return starts

    def within(self, start: int, stop: int, *, keep_last: bool) -> list[Span]:
        """Return the units of a stage of atoms ``start`` to ``stop - 1``.

        ``keep_last``: the stage has one microbatch in flight at most, so its last unit need not run again: its backward
        is next. The user's own units always run again.
        """
        spans = [(max(a, start), min(b, stop)) for a, b in self.spans if a < stop and start < b]
        if keep_last and not self.of_user and spans and spans[-1][1] == stop:
            spans.pop()
        return spans


def recompute_units(atoms: Atoms) -> Units:
    """Return the units of a graph."""
    chooser = _Chooser(atoms)
    calls = chooser.of_user()
    if any(node.checkpoint for node in atoms.graph.nodes):
        return Units(tuple(calls), of_user=True)
    return Units(tuple(chooser.allowed(chooser.repeated() or chooser.runs())))


class _Chooser:
    """Chooses the units of one graph."""

    def __init__(self, atoms: Atoms) -> None:
        self.atoms, self.graph = atoms, atoms.graph
        self.saved = [0] * (atoms.count + 1)  # by atom a, the bytes saved before it
        for atom, node in atoms.work:
            self.saved[atom + 1] += atoms.costs[node.name].saved_bytes
        self.saved = list(itertools.accumulate(self.saved))
        # by atom, the bytes that cross its start
        self.crossing = [
            sum(atoms.cuts.spec(value).num_bytes(atoms.sizes) for value in atoms.cuts.crossing[edge])
            for edge in atoms.edges[:-1]
        ]

    def of_user(self) -> list[Span]:
        """Return the units of the user's calls of checkpoint()."""
        calls: dict[int, list[int]] = {}
        for index, node in enumerate(self.graph.nodes):
            if node.checkpoint and not node.input_only:
                calls.setdefault(node.checkpoint, []).append(index)
        spans = [self._span(positions[0], positions[-1]) for positions in calls.values()]
        return self.allowed(span for span in spans if span)

    def repeated(self) -> list[Span]:
        """Return the units of the repeated modules; [] if the model has none, or they save no memory."""
        families = _families(self.graph)
        spans: dict[str, Span] = {}
        for paths in families.values():
            for path in paths:
                span = self._span(*self.graph.module_spans[path])
                if span is not None:
                    spans[path] = span
        chosen = {p: s for p, s in spans.items() if not any(p.startswith(f"{other}.") for other in spans)}
        if not chosen:
            return []
        best = self._with_gaps(chosen.values())
        while chosen:
            # the largest unit, divided into the blocks inside it
            largest = max(chosen, key=lambda path: self._bytes(chosen[path]))
            inner = {p: s for p, s in spans.items() if p.startswith(f"{largest}.")}
            inner = {p: s for p, s in inner.items() if not any(p.startswith(f"{other}.") for other in inner)}
            chosen = {p: s for p, s in chosen.items() if p != largest} | inner
            if len(inner) < 2:
                break
            candidate = self._with_gaps(chosen.values())
            best = min(best, candidate, key=self._peak)
        return best if len(best) > 1 and self._peak(best) < self.saved[-1] else []

    def runs(self) -> list[Span]:
        """Return units of about equal size between atoms where few bytes cross; [] if none save memory."""
        best: list[Span] = []
        total, n = self.saved[-1], self.atoms.count
        for count in range(2, min(n, _MOST_RUNS) + 1):
            edges = [0]
            while total - self.saved[edges[-1]] > total / count:
                begin = self.saved[edges[-1]]
                low = bisect.bisect_left(self.saved, begin + total / count / 2)
                high = bisect.bisect_right(self.saved, begin + total / count * 1.25)
                ends = [end for end in range(max(low, edges[-1] + 1), high) if end < n]
                ends = ends or [min(max(low, edges[-1] + 1), n)]
                goal = begin + total / count
                edges.append(min(ends, key=functools.partial(self._choice, goal)))
                if edges[-1] >= n:
                    edges.pop()
                    break
            spans = list(itertools.pairwise([*edges, n]))
            if self._peak(spans) < min(total, self._peak(best) if best else total):
                best = spans
            if best and self._peak(spans) > 2 * self._peak(best):
                break
        return best

    def _choice(self, goal: float, end: int) -> tuple[int, float]:
        """Return the order in which ends of a unit are preferred: few bytes cross, then near ``goal`` bytes saved."""
        return self.crossing[end] if end < self.atoms.count else 0, abs(self.saved[end] - goal)

    def allowed(self, spans: Iterable[Span]) -> list[Span]:
        """Return the spans in order, without overlap, that may run twice."""
        chosen: list[Span] = []
        for first, stop in sorted(spans):
            if (not chosen or chosen[-1][1] <= first) and self._may_run_twice(first, stop):
                chosen.append((first, stop))
        return chosen

    def _may_run_twice(self, first: int, stop: int) -> bool:
        return may_run_twice(self.atoms.cuts, self.atoms.edges[first], self.atoms.edges[stop])

    def _span(self, first: int, last: int) -> Span | None:
        """Return the largest run of whole atoms in the nodes ``first`` to ``last``, both included."""
        of_position, nodes = self.atoms.of_position, self.graph.nodes
        before = next((p for p in range(first - 1, -1, -1) if not nodes[p].input_only), None)
        behind = next((p for p in range(last + 1, len(nodes)) if not nodes[p].input_only), None)
        start = of_position[first] + (before is not None and of_position[before] == of_position[first])
        stop = of_position[last] + (behind is None or of_position[behind] != of_position[last])
        return (start, stop) if start < stop else None

    def _bytes(self, span: Span) -> int:
        return self.saved[span[1]] - self.saved[span[0]]

    def _peak(self, spans: Sequence[Span]) -> int:
        return sum(self.crossing[first] for first, _ in spans) + max((self._bytes(span) for span in spans), default=0)

    def _with_gaps(self, spans: Iterable[Span]) -> list[Span]:
        """Return the spans without overlap, and what lies between them if it saves more than what enters it."""
        disjoint: list[Span] = []
        for span in sorted(spans):
            if not disjoint or disjoint[-1][1] <= span[0]:
                disjoint.append(span)
        edges = [0, *(edge for span in disjoint for edge in span), self.atoms.count]
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return sorted(disjoint + [gap for gap in gaps if gap[0] < gap[1] and self._bytes(gap) > self.crossing[gap[0]]])


def may_run_twice(cuts: Cuts, start: int, stop: int) -> bool:
    """Return whether the nodes ``start`` to ``stop - 1``, between legal cuts, read the same values if they run again.

    They do not if they read memory of the batch, or computed from the batch alone, that changes in place afterwards. A
    legal cut excludes that for all other memory, and buffers are exchanged.
    """
    graph = cuts.graph
    read = {cuts.storage(value) for node in graph.nodes[start:stop] for value in node.inputs}
    changed = {cuts.storage(value) for node in graph.nodes[start:] for value in node.mutates}
    return all(graph.position.get(memory, -1) >= start for memory in read & changed)


def _families(graph: Graph) -> dict[str, list[str]]:
    """Return the repeated modules by their container: at least two children with numbers as names and own modules.

    Modules that are called again after their siblings are left out: their calls are not one run.
    """
    families: dict[str, list[str]] = {}
    for path in graph.module_spans:
        parent, _, name = path.rpartition(".")
        if name.isdigit() and path in graph.containers:
            families.setdefault(parent, []).append(path)
    ordered = {}
    for parent, paths in families.items():
        spans = sorted(graph.module_spans[path] for path in paths)
        if len(paths) > 1 and all(a[1] < b[0] for a, b in itertools.pairwise(spans)):
            ordered[parent] = paths
    return ordered


class Atoms:
    """A graph at one microbatch size, by atoms."""

    def __init__(self, graph: Graph, cuts: Cuts, measurement: Measurement) -> None:
        self.graph = graph
        self.cuts = cuts
        self.costs: Mapping[str, NodeCost] = measurement.costs
        self.keepers: Mapping[str, str] = measurement.keepers
        self.casts: Mapping[str, int] = measurement.casts
        self.sizes: Mapping[str, int] = graph.sizes(measurement.microbatch_size)
        self.edges: tuple[int, ...] = (0, *cuts.legal, len(graph.nodes))  # the start of every atom, and the end
        self.count = len(self.edges) - 1
        self.of_position: list[int] = []  # the atom of every node, by position
        for index, (start, stop) in enumerate(itertools.pairwise(self.edges)):
            self.of_position.extend([index] * (stop - start))
        self.by_name: Mapping[str, Node] = {node.name: node for node in graph.nodes}
        self.reads: Mapping[str, set[int]] = self._atoms_that_read()

    def _atoms_that_read(self) -> dict[str, set[int]]:
        """Return, for every value, the atoms whose stage needs it, directly or through input-only nodes."""
        reads: dict[str, set[int]] = {}
        for index, node in enumerate(self.graph.nodes):
            if not node.input_only:
                for value in node.inputs:
                    reads.setdefault(value, set()).add(self.of_position[index])
                for value in node.after:
                    if self.is_input_only(value):
                        reads.setdefault(value, set()).add(self.of_position[index])
        for value in self.graph.outputs:
            reads.setdefault(value, set()).add(self.count - 1)
        for node in reversed(self.graph.nodes):
            if node.input_only and node.name in reads:
                for value in (*node.inputs, *node.after):
                    reads.setdefault(value, set()).update(reads[node.name])
        return reads

    def is_input_only(self, value: str) -> bool:
        """Return whether the value is computed from the batch alone, by every stage that reads it."""
        node = self.by_name.get(value)
        return node is not None and node.input_only

    @functools.cached_property
    def units(self) -> Units:
        """What recompute by block runs again."""
        return recompute_units(self)

    @functools.cached_property
    def work(self) -> list[tuple[int, Node]]:
        """The nodes that exactly one stage runs, in order, each with its atom."""
        return [(self.of_position[i], node) for i, node in enumerate(self.graph.nodes) if not node.input_only]

    @functools.cached_property
    def copied(self) -> list[Node]:
        """The input-only nodes that some stage reads. Every stage that reads one runs it."""
        return [node for node in self.graph.nodes if node.input_only and node.name in self.reads]

    def produced_at(self, value: str) -> int:
        """Return the atom that produces a value; -1 for what every stage has or computes itself."""
        node = self.by_name.get(value)
        return -1 if node is None or node.input_only else self.of_position[self.graph.position[value]]

    def num_bytes(self, value: str) -> int:
        """Return the bytes of a value; 0 for an input-only view of other memory, and for what is not one tensor."""
        node = self.by_name.get(value)
        if node is None:
            return self.input_bytes[value]
        if node.input_only:
            return 0 if node.storage else self.costs[value].output_bytes
        return 0 if node.spec is None else node.spec.num_bytes(self.sizes)

    @functools.cached_property
    def input_bytes(self) -> dict[str, int]:
        """The bytes of the batch's tensors."""
        return {entry.name: entry.spec.num_bytes(self.sizes) for entry in self.graph.inputs}

    def carries_gradient(self, value: str) -> bool:
        """Return whether a gradient flows back through the value."""
        node = self.by_name.get(value)
        return node is not None and not node.input_only and node.spec is not None and node.spec.requires_grad

    def has_trained(self, node: Node) -> bool:
        """Return whether a node has parameters to train."""
        return any(self.graph.parameters[name].requires_grad for name in node.parameters)

    def later_readers(self, value: str, producer: int) -> set[int]:
        """Return the atoms behind ``producer`` that read the value."""
        return {atom for atom in self.reads.get(value, ()) if atom > producer}

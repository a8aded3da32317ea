"""``Tables``: what a stage would cost, for every pair of cuts at once.

The legal cuts divide the graph into ``n`` *atoms*; a stage is a run of atoms ``i..j-1``. Most of its cost is not a
sum over its atoms: a value read twice in a stage is received once, a parameter read by two layers is stored once, an
input-only node that three layers read is computed once. Each of these is a count of distinct things, and the number of
things that the stage touches, for all pairs (i, j), is a sum of rectangles in the plane of pairs:

- a thing used at atoms u1 < u2 < ... counts for (i, j) when some u has i <= u < j (``distinct``);
- a value made at atom a and used later is received by (i, j) when a < i and some use lies in it (``distinct`` from a);
- it is sent by (i, j) when i <= a < j and a use lies at or behind j (``rectangle``).

So all tables take O(uses + n^2), exactly, and the search reads a stage's cost in O(1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph, Node
from autopipe.ir.profile import Measurement
from autopipe.planning.cost.ownership import unused_state

Array = npt.NDArray[np.float64]


class PairSum:
    """Sums rectangles over the pairs (i, j), 0 <= i, j <= n, then gives the whole table."""

    def __init__(self, num_atoms: int) -> None:
        self._corners = np.zeros((num_atoms + 2, num_atoms + 2))
        self._n = num_atoms

    def rectangle(self, i_from: int, i_to: int, j_from: int, j_to: int, weight: float) -> None:
        """Add ``weight`` to every (i, j) with i_from <= i <= i_to and j_from <= j <= j_to."""
        if i_from > i_to or j_from > j_to or not weight:
            return
        self._corners[i_from, j_from] += weight
        self._corners[i_to + 1, j_from] -= weight
        self._corners[i_from, j_to + 1] -= weight
        self._corners[i_to + 1, j_to + 1] += weight

    def distinct(self, uses: Iterable[int], weight: float, after: int = -1) -> None:
        """Add ``weight`` once to every (i, j) that holds one of ``uses`` (atoms), for i > ``after``."""
        previous = after
        for use in sorted(set(uses)):
            self.rectangle(previous + 1, use, use + 1, self._n, weight)
            previous = max(previous, use)

    def table(self, base: Array | float = 0.0) -> Array:
        """Return the (n + 1, n + 1) table on top of another; entries with i >= j mean nothing."""
        total: Array = self._corners.cumsum(axis=0).cumsum(axis=1)
        return np.maximum(total[:-1, :-1] + base, 0.0)


@dataclass(frozen=True)
class Tables:
    """Per microbatch, for a stage of atoms i..j-1: arrays of shape (n + 1, n + 1), seconds and bytes.

    ``edges``: the node position of every atom's start, and the end. ``forward_seconds`` counts the input-only nodes
    that the stage computes for itself. ``saved_bytes``: kept from forward to backward, outputs that the backward
    starts from included, what is in ``kept_bytes`` not. ``workspace_bytes``: what a backward takes on top of all
    that is saved, see ``memory``. ``between_bytes``: gradients that the first half of a split backward leaves for
    the second. ``kept_bytes``: batch tensors, values received and input-only results, which stay with recompute
    too. ``received``/``sent``: a value whose gradient comes back counts twice. ``weight_bytes`` counts buffers.
    ``stepped_bytes``: parameters that the stage itself steps (a tied one is stepped by the first stage that has
    it). ``tied_bytes``: trained parameters that other stages use as well. ``edge_bytes``, shape (n + 1,): all values
    alive across a cut.
    """

    edges: tuple[int, ...]
    forward_seconds: Array
    backward_seconds: Array
    saved_bytes: Array
    workspace_bytes: Array
    between_bytes: Array
    kept_bytes: Array
    received: Array
    sent: Array
    weight_bytes: Array
    gradient_bytes: Array
    stepped_bytes: Array
    tied_bytes: Array
    edge_bytes: Array

    @property
    def num_atoms(self) -> int:
        """How many atoms: one more than the legal cuts."""
        return len(self.edges) - 1


@dataclass
class _Memory:
    """One memory, under whatever names: the atom that makes it, the atoms behind that read it, and who sends it.

    ``sent``: for each name through which a gradient comes back, the atom that makes it and the last that reads it.
    """

    producer: int
    size: int
    reads: set[int] = field(default_factory=set)
    sent: list[tuple[int, int]] = field(default_factory=list)

    def correct(self, extra: PairSum, keeper: int | None, num_atoms: int) -> None:
        """Count it as it is held, given the atom that is the first to keep it; what nodes save holds it there."""
        if self.sent and self.producer >= 0:
            first, last = min(producer for producer, _ in self.sent), max(last for _, last in self.sent)
            extra.rectangle(0, self.producer, first + 1, last if keeper is None else min(last, keeper), self.size)
        if keeper is None or keeper <= self.producer:
            return
        extra.rectangle(self.producer + 1, keeper, keeper + 1, num_atoms, -self.size)
        # but not for a stage that holds the keeper and has the memory by no name
        before = max((atom for atom in self.reads if atom <= keeper), default=self.producer)
        behind = min((atom for atom in self.reads if atom > keeper), default=num_atoms)
        extra.rectangle(before + 1, keeper, keeper + 1, behind, self.size)


def build_tables(graph: Graph, cuts: Cuts, measurement: Measurement) -> Tables:
    """Return the tables of a graph at the measurement's microbatch size."""
    return _Builder(graph, cuts, measurement).build()


class _Builder:
    """Holds what the tables share while they are filled: the atom of each node, and who reads what."""

    def __init__(self, graph: Graph, cuts: Cuts, measurement: Measurement) -> None:
        self.graph = graph
        self.cuts = cuts
        self.costs = measurement.costs
        self.keepers = measurement.keepers
        self.sizes = graph.sizes(measurement.microbatch_size)
        self.edges = (0, *cuts.legal, len(graph.nodes))
        self.n = len(self.edges) - 1
        self.atom: list[int] = []
        for index, (start, stop) in enumerate(zip(self.edges, self.edges[1:], strict=False)):
            self.atom.extend([index] * (stop - start))
        self.by_name = {node.name: node for node in graph.nodes}
        self.reads = self._atoms_that_read()

    def _atoms_that_read(self) -> dict[str, set[int]]:
        """Return, for every value, the atoms whose stage needs it; through input-only nodes, what those read."""
        reads: dict[str, set[int]] = {}
        for index, node in enumerate(self.graph.nodes):
            if not node.input_only:
                for value in node.inputs:
                    reads.setdefault(value, set()).add(self.atom[index])
                for value in node.after:
                    if self._input_only(value):
                        reads.setdefault(value, set()).add(self.atom[index])
        for value in self.graph.outputs:
            reads.setdefault(value, set()).add(self.n - 1)
        for node in reversed(self.graph.nodes):
            if node.input_only and node.name in reads:
                for value in (*node.inputs, *node.after):
                    reads.setdefault(value, set()).update(reads[node.name])
        return reads

    def _input_only(self, value: str) -> bool:
        node = self.by_name.get(value)
        return node is not None and node.input_only

    def build(self) -> Tables:
        work = [(self.atom[i], node) for i, node in enumerate(self.graph.nodes) if not node.input_only]
        copied = [node for node in self.graph.nodes if node.input_only and node.name in self.reads]
        received, sent, kept, edge = self._values(work)
        for entry in self.graph.inputs:
            kept.distinct(self.reads.get(entry.name, ()), entry.spec.num_bytes(self.sizes))
        for node in copied:
            if not node.storage:
                kept.distinct(self.reads[node.name], self.costs[node.name].output_bytes)
        weights, gradients, stepped, tied = self._state(work, copied)
        return Tables(
            self.edges,
            self._seconds(work, copied, "forward_seconds"),
            self._seconds(work, copied, "backward_seconds"),
            self._saved(work, copied),
            self._workspace(work),
            self._between_halves(work),
            kept.table(),
            received.table(),
            sent.table(),
            weights.table(),
            gradients.table(),
            stepped,
            tied.table(),
            edge,
        )

    def _sum(self, work: Sequence[tuple[int, Node]], field: str) -> Array:
        atoms = np.zeros(self.n + 1)
        for atom, node in work:
            atoms[atom + 1] += getattr(self.costs[node.name], field)
        return _between(atoms)

    def _saved(self, work: Sequence[tuple[int, Node]], copied: Sequence[Node]) -> Array:
        """Return what the nodes of a stage save, corrected for what the profile cannot know: where the cuts are.

        The memory of a value that a stage has from elsewhere is counted there. A value that it sends is held for the
        backward that starts from it, also where no node of the stage saves it.
        """
        extra, memories = PairSum(self.n), dict[str, _Memory]()
        names = [(entry.name, -1) for entry in self.graph.inputs] + [(node.name, -1) for node in copied]
        for name, producer in [*names, *((node.name, atom) for atom, node in work if node.spec is not None)]:
            later = {atom for atom in self.reads.get(name, ()) if atom > producer}
            if not later:
                continue
            base = self.cuts.storage(name)
            memory = memories.setdefault(base, _Memory(self._made_at(base), self._size(base)))
            memory.reads |= later
            node = self.by_name.get(name)
            if producer >= 0 and node is not None and node.spec is not None and node.spec.requires_grad:
                memory.sent.append((producer, max(later)))
        keepers: dict[str, int] = {}
        for value, keeper in self.keepers.items():
            base, at = self.cuts.storage(value), self.graph.position[keeper]
            keepers[base] = min(at, keepers.get(base, at))
        for base, memory in memories.items():
            memory.correct(extra, self.atom[keepers[base]] if base in keepers else None, self.n)
        return extra.table(self._sum(work, "saved_bytes"))

    def _made_at(self, value: str) -> int:
        """Return the atom in which a value is made; -1 for what every stage has or computes for itself."""
        node = self.by_name.get(value)
        return -1 if node is None or node.input_only else self.atom[self.graph.position[value]]

    def _size(self, value: str) -> int:
        node = self.by_name.get(value)
        if node is None:
            return next(e.spec.num_bytes(self.sizes) for e in self.graph.inputs if e.name == value)
        if node.input_only:
            return 0 if node.storage else self.costs[value].output_bytes
        return 0 if node.spec is None else node.spec.num_bytes(self.sizes)

    def _workspace(self, work: Sequence[tuple[int, Node]]) -> Array:
        """Return ``max(w_x + saved before and at x) - saved of all``, over the nodes x of a stage; 0 where less."""
        before, most = 0.0, np.full(self.n, -np.inf)
        saved = np.zeros(self.n + 1)
        for atom, node in work:
            before += self.costs[node.name].saved_bytes
            most[atom] = max(most[atom], self.costs[node.name].workspace_bytes + before)
            saved[atom + 1 :] = before
        # row i: the running maximum from atom i on
        running = np.where(np.arange(self.n)[None, :] >= np.arange(self.n + 1)[:, None], most[None, :], -np.inf)
        table = np.zeros((self.n + 1, self.n + 1))
        table[:, 1:] = np.maximum.accumulate(running, axis=1) - saved[None, 1:]
        return np.maximum(table, 0.0)

    def _between_halves(self, work: Sequence[tuple[int, Node]]) -> Array:
        """Return the bytes of what arrives at the nodes that have weights to train: as large as their results."""
        atoms = np.zeros(self.n + 1)
        for atom, node in work:
            if any(self.graph.parameters[name].requires_grad for name in node.parameters):
                atoms[atom + 1] += self.costs[node.name].output_bytes
        return _between(atoms)

    def _seconds(self, work: Sequence[tuple[int, Node]], copied: Sequence[Node], field: str) -> Array:
        extra = PairSum(self.n)
        for node in copied:
            extra.distinct(self.reads[node.name], getattr(self.costs[node.name], field))
        return self._sum(work, field) + extra.table()

    def _values(self, work: Sequence[tuple[int, Node]]) -> tuple[PairSum, PairSum, PairSum, Array]:
        received, sent, kept = PairSum(self.n), PairSum(self.n), PairSum(self.n)
        edge = np.zeros(self.n + 1)
        for producer, node in work:
            later = {atom for atom in self.reads.get(node.name, ()) if atom > producer}
            if node.spec is None or not later:
                continue
            size = node.spec.num_bytes(self.sizes)
            traffic = size * (2 if node.spec.requires_grad else 1)
            received.distinct(later, traffic, after=producer)
            kept.distinct(later, size, after=producer)
            sent.rectangle(0, producer, producer + 1, max(later), traffic)
            edge[producer + 1 : max(later) + 1] += size
        return received, sent, kept, edge

    def _state(
        self, work: Sequence[tuple[int, Node]], copied: Sequence[Node]
    ) -> tuple[PairSum, PairSum, Array, PairSum]:
        weights, gradients, tied = PairSum(self.n), PairSum(self.n), PairSum(self.n)
        stepped = np.zeros(self.n + 1)
        users: dict[str, set[int]] = {}
        for atom, node in work:
            for name in (*node.parameters, *node.buffers, *node.buffers_written):
                users.setdefault(name, set()).add(atom)
        for node in copied:
            for name in (*node.parameters, *node.buffers):
                users.setdefault(name, set()).update(self.reads[node.name])
        for name, home in unused_state(self.graph).items():
            users[name] = {self.atom[home]}
        for name, spec in self.graph.parameters.items():
            size, atoms = spec.num_bytes(self.sizes), users[name]
            weights.distinct(atoms, size)
            if spec.requires_grad:
                gradients.distinct(atoms, size)
                stepped[min(atoms) + 1] += size
            if len(atoms) > 1 and spec.requires_grad:
                tied.distinct(atoms, size)
                tied.rectangle(0, min(atoms), max(atoms) + 1, self.n, -size)
        for name, spec in self.graph.buffers.items():
            weights.distinct(users[name], spec.num_bytes(self.sizes))
        return weights, gradients, _between(stepped), tied


def _between(amounts: Array) -> Array:
    """Return the table of sums over atoms i..j-1; ``amounts[a + 1]`` is atom a's."""
    prefix: Array = amounts.cumsum()
    table: Array = np.maximum(prefix[None, :] - prefix[:, None], 0.0)
    return table

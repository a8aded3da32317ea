"""``ByteSums``: the bytes of a stage, term by term, in whole numbers. This is their only definition.

The search reads ``tables``, all pairs of cuts at once. ``build_plan``, and the peaks that follow a schedule, take
``along``, the stages of one plan. Both add the same contributions (``pair_sum``), so they are equal. ``memory``
explains the terms, and ``stage_peak`` there combines them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopipe.planning.cost.atoms import Atoms
from autopipe.planning.cost.memory import stage_peak
from autopipe.planning.cost.ownership import unused_state
from autopipe.planning.cost.pair_sum import Array, PairSum, PeakWorkspace


@dataclass(frozen=True, slots=True)
class StageTerms:
    """The bytes of one stage, by term."""

    weights: int  # W: one version of the weights, and the buffers
    gradients: int  # G: of the trained parameters
    stepped: int  # the trained parameters that the stage itself steps; the first stage that has one steps it
    optimizer: int  # O: optimizer state of those
    saved: int  # A: per microbatch, kept for the backward; what is in ``kept`` is not
    kept: int  # K: per microbatch, kept for the backward even with recompute
    between: int  # H: gradients that the first half of a split backward leaves for the second
    workspace: int  # X: taken by the backward on top of what is saved

    def peak(self, in_flight: int, versions: int, recompute: bool, waiting: int = 0) -> int:
        """Return the peak with ``in_flight`` microbatches in flight and ``waiting`` halves of a backward."""
        fixed = self.gradients + self.optimizer + self.workspace + waiting * self.between
        saved_in_flight = 1 if recompute else in_flight
        return stage_peak(self.weights, versions, fixed, self.kept, in_flight, self.saved, saved_in_flight)


@dataclass(frozen=True)
class ByteTables:
    """The terms of ``StageTerms`` for every pair of cuts: arrays of shape (n + 1, n + 1), whole numbers in float64."""

    weights: Array
    gradients: Array
    stepped: Array
    optimizer: Array
    saved: Array
    kept: Array
    between: Array
    workspace: Array

    def peaks(self, in_flight: int, versions: int, waiting: int = 0) -> tuple[Array, Array]:
        """Return the peaks of all pairs without and with recompute; see ``StageTerms.peak``."""
        fixed = self.fixed + waiting * self.between if waiting else self.fixed
        plain = stage_peak(self.weights, versions, fixed, self.kept, in_flight, self.saved, in_flight)
        return plain, plain - (in_flight - 1) * self.saved

    @functools.cached_property
    def fixed(self) -> Array:
        """G + O + X: the bytes that depend neither on weight versions nor on microbatches in flight."""
        return self.gradients + self.optimizer + self.workspace


class ByteSums:
    """The contributions of a graph's values, parameters and buffers to the terms of every stage."""

    def __init__(self, atoms: Atoms, optimizer_bytes_per_byte: float) -> None:
        self._atoms = atoms
        self._optimizer_bytes_per_byte = optimizer_bytes_per_byte
        n = atoms.count
        self.weights, self.gradients, self.stepped, self.tied = PairSum(n), PairSum(n), PairSum(n), PairSum(n)
        self.saved, self.kept, self.between, self.workspace = PairSum(n), PairSum(n), PairSum(n), PeakWorkspace(n)
        self._add_state()
        self._add_kept()
        self._add_nodes()
        for memory in self._memories():
            memory.correct(self.saved, n)

    def tables(self) -> ByteTables:
        """Return the terms of every pair of cuts."""
        stepped = self.stepped.table()
        return ByteTables(
            self.weights.table(),
            self.gradients.table(),
            stepped,
            np.ceil(self._optimizer_bytes_per_byte * stepped),
            self.saved.table(),
            self.kept.table(),
            self.between.table(),
            self.workspace.table(),
        )

    def along(self, starts: Sequence[int]) -> list[StageTerms]:
        """Return the terms of the stages of a plan that start at these node positions, all of them legal cuts or 0."""
        atom_at = {position: atom for atom, position in enumerate(self._atoms.edges)}
        edges = [*(atom_at[start] for start in starts), self._atoms.count]
        state = (self.weights, self.gradients, self.stepped)
        activations = (self.saved, self.kept, self.between, self.workspace)
        columns = [term.along(edges).tolist() for term in (*state, *activations)]
        return [
            StageTerms(w, g, stepped, math.ceil(self._optimizer_bytes_per_byte * stepped), *others)
            for w, g, stepped, *others in zip(*columns, strict=True)
        ]

    def _add_state(self) -> None:
        atoms, graph = self._atoms, self._atoms.graph
        users: dict[str, set[int]] = {}
        for atom, node in atoms.work:
            for name in (*node.parameters, *node.buffers, *node.buffers_written):
                users.setdefault(name, set()).add(atom)
        for node in atoms.copied:
            for name in (*node.parameters, *node.buffers, *node.buffers_written):
                users.setdefault(name, set()).update(atoms.reads[node.name])
        for name, home in unused_state(graph).items():
            users[name] = {atoms.of_position[home]}
        for name, spec in graph.parameters.items():
            size, used_at = spec.num_bytes(atoms.sizes), users[name]
            self.weights.distinct(used_at, size)
            if not spec.requires_grad:
                continue
            self.gradients.distinct(used_at, size)
            self.stepped.atom(min(used_at), size)
            if len(used_at) > 1:
                self.tied.distinct(used_at, size)
                self.tied.rectangle(0, min(used_at), max(used_at) + 1, atoms.count, -size)
        for name, spec in graph.buffers.items():
            self.weights.distinct(users[name], spec.num_bytes(atoms.sizes))

    def _add_kept(self) -> None:
        atoms = self._atoms
        for entry in atoms.graph.inputs:
            self.kept.distinct(atoms.reads.get(entry.name, ()), atoms.input_bytes[entry.name])
        for node in atoms.copied:
            self.kept.distinct(atoms.reads[node.name], atoms.num_bytes(node.name))
        for producer, node in atoms.work:
            later = atoms.later_readers(node.name, producer)
            self.kept.distinct(later, atoms.num_bytes(node.name), after=producer)

    def _add_nodes(self) -> None:
        atoms = self._atoms
        for atom, node in atoms.work:
            cost = atoms.costs[node.name]
            self.saved.atom(atom, cost.saved_bytes)
            self.workspace.node(atom, cost.saved_bytes, cost.workspace_bytes)
            if atoms.has_trained(node):
                self.between.atom(atom, cost.output_bytes)

    def _memories(self) -> Iterator[_Memory]:
        """Yield the memory of all values that a cut can separate from their readers, once under all its names."""
        atoms, storage = self._atoms, self._atoms.cuts.storage
        keepers: dict[str, int] = {}
        for value, keeper in atoms.keepers.items():
            base, at = storage(value), atoms.graph.position[keeper]
            keepers[base] = min(at, keepers.get(base, at))
        memories: dict[str, _Memory] = {}
        names = [(entry.name, -1) for entry in atoms.graph.inputs] + [(node.name, -1) for node in atoms.copied]
        for name, producer in [*names, *((node.name, atom) for atom, node in atoms.work if node.spec is not None)]:
            later = atoms.later_readers(name, producer)
            if not later:
                continue
            base = storage(name)
            if base not in memories:
                kept_at = atoms.of_position[keepers[base]] if base in keepers else None
                memories[base] = _Memory(atoms.produced_at(base), atoms.num_bytes(base), kept_at)
            memories[base].reads |= later
            if producer >= 0 and atoms.carries_gradient(name):
                memories[base].sent.append((producer, max(later)))
        yield from memories.values()


@dataclass
class _Memory:
    """One memory, under all its names, and how a cut changes who counts it.

    A profile counts a tensor at the first node that keeps it for its backward. A stage that has the memory from
    elsewhere counts it in ``kept`` instead. A stage that sends a value keeps it until the backward that starts from it,
    even if none of its own nodes does.
    """

    producer: int  # the atom that produces it; -1: every stage has it
    size: int  # bytes
    keeper: int | None  # the atom of the first node that keeps it; None if no node does
    reads: set[int] = field(default_factory=set)  # the later atoms that read it
    # for each name through which a gradient comes back: the atom that produces it and the last one that reads it
    sent: list[tuple[int, int]] = field(default_factory=list)

    def correct(self, saved: PairSum, num_atoms: int) -> None:
        """Correct the sum of what the nodes save."""
        if self.sent and self.producer >= 0:
            first, last = min(producer for producer, _ in self.sent), max(last for _, last in self.sent)
            last = last if self.keeper is None else min(last, self.keeper)
            saved.rectangle(0, self.producer, first + 1, last, self.size)
        if self.keeper is None or self.keeper <= self.producer:
            return
        saved.rectangle(self.producer + 1, self.keeper, self.keeper + 1, num_atoms, -self.size)
        # except for a stage that contains the keeper and reads the memory under no name
        before = max((atom for atom in self.reads if atom <= self.keeper), default=self.producer)
        behind = min((atom for atom in self.reads if atom > self.keeper), default=num_atoms)
        saved.rectangle(before + 1, self.keeper, self.keeper + 1, behind, self.size)

"""``ByteSums``: the bytes of a stage, term by term, in whole numbers. This is their only definition.

The search reads ``tables``, all pairs of cuts at once. ``build_plan``, and the peaks that follow a schedule, take
``along``, the stages of one plan. Both add the same contributions (``pair_sum``), so they are equal. ``memory``
explains the terms, and ``stage_peak`` there combines them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopipe.planning.cost.atoms import Atoms
from autopipe.planning.cost.block_sums import BlockSums, BlockTables
from autopipe.planning.cost.memory import even_share, stage_peak
from autopipe.planning.cost.ownership import unused_state
from autopipe.planning.cost.pair_sum import Array, Largest, PairSum, PeakWorkspace, stored_values


@dataclass(frozen=True, slots=True)
class StageTerms:
    """The bytes of one stage, by term."""

    weights: int  # W: one version of the weights with their 16-bit casts, and the buffers
    gradients: int  # G: of the trained parameters
    stepped: int  # the trained parameters that the stage itself steps; the first stage that has one steps it
    optimizer: int  # O: optimizer state of those
    largest: int  # the optimizer state of the largest of those
    saved: int  # A: per microbatch, kept for the backward; what is in ``kept`` is not
    kept: int  # K: per microbatch, kept for the backward even with recompute
    between: int  # H: gradients that the first half of a split backward leaves for the second
    workspace: int  # X: taken by the backward on top of what is saved
    crossing: int = 0  # C: per microbatch, kept for the backward with recompute by block, besides ``kept``
    unit: int = 0  # U: taken by the backward of a unit, with recompute by block

    def optimizer_on(self, sharing: int) -> int:
        """Return the most optimizer state on one of the replicas that divide it; all of it for one."""
        return min(self.optimizer, even_share(self.optimizer, self.largest, sharing))

    def peak(self, in_flight: int, versions: int, recompute: str, waiting: int = 0, sharing: int = 1) -> int:
        """Return the peak with ``in_flight`` microbatches in flight and ``waiting`` halves of a backward.

        ``recompute``: one of ``RECOMPUTE_MODES``; for ``block``, the terms must include those of units. ``sharing``:
        the number of replicas that divide the optimizer state.
        """
        state = self.gradients + self.optimizer_on(sharing) + waiting * self.between
        if recompute == "block":
            return stage_peak(self.weights, versions, state + self.unit, self.kept, in_flight, self.crossing, in_flight)
        saved_in_flight = 1 if recompute == "stage" else in_flight
        fixed = state + self.workspace
        return stage_peak(self.weights, versions, fixed, self.kept, in_flight, self.saved, saved_in_flight)


@dataclass(frozen=True)
class ByteTables:
    """The terms of ``StageTerms`` for every pair of cuts: arrays of shape (n + 1, n + 1), whole numbers in float64."""

    weights: Array
    gradients: Array
    stepped: Array
    optimizer: Array
    largest: Array
    saved: Array
    kept: Array
    between: Array
    workspace: Array

    def peak(
        self,
        in_flight: int,
        versions: int,
        recompute: str,
        waiting: int = 0,
        block: BlockTables | None = None,
        sharing: int = 1,
    ) -> Array:
        """Return the peaks of all pairs; see ``StageTerms.peak``. ``block``: the terms of units, for that mode."""
        if block is not None and recompute == "block":
            fixed = self.gradients + self.optimizer + block.unit
            saved, saved_in_flight = block.crossing, in_flight
        else:
            fixed, saved, saved_in_flight = self.fixed, self.saved, 1 if recompute == "stage" else in_flight
        if sharing > 1:
            fixed = fixed - np.maximum(self.optimizer - even_share(self.optimizer, self.largest, sharing), 0.0)
        fixed = fixed + waiting * self.between if waiting else fixed
        return stage_peak(self.weights, versions, fixed, self.kept, in_flight, saved, saved_in_flight)

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
        self.largest = Largest(n)
        self._add_state()
        self._add_kept()
        self._add_nodes()
        for value in stored_values(atoms):
            value.correct(self.saved, n)

    def tables(self) -> ByteTables:
        """Return the terms of every pair of cuts."""
        stepped = self.stepped.table()
        return ByteTables(
            self.weights.table(),
            self.gradients.table(),
            stepped,
            np.ceil(self._optimizer_bytes_per_byte * stepped),
            np.ceil(self._optimizer_bytes_per_byte * self.largest.table()),
            self.saved.table(),
            self.kept.table(),
            self.between.table(),
            self.workspace.table(),
        )

    @functools.cached_property
    def by_block(self) -> BlockSums:
        """The terms of recompute by block."""
        return BlockSums(self._atoms, self._atoms.units, stored_values(self._atoms))

    def along(self, starts: Sequence[int], *, by_block: bool = False) -> list[StageTerms]:
        """Return the terms of the stages of a plan that start at these node positions, all of them legal cuts or 0.

        ``by_block``: with the terms of recompute by block.
        """
        atom_at = {position: atom for atom, position in enumerate(self._atoms.edges)}
        edges = [*(atom_at[start] for start in starts), self._atoms.count]
        state = (self.weights, self.gradients, self.stepped)
        activations = (self.saved, self.kept, self.between, self.workspace)
        columns = [term.along(edges).tolist() for term in (*state, self.largest, *activations)]
        units = self.by_block.along(edges) if by_block else [(0, 0)] * len(starts)
        per_byte = self._optimizer_bytes_per_byte
        return [
            StageTerms(
                *(w, g, stepped, math.ceil(per_byte * stepped), math.ceil(per_byte * largest)),
                *(saved, kept, between, workspace),
                *of_units,
            )
            for (w, g, stepped, largest, saved, kept, between, workspace), of_units in zip(
                zip(*columns, strict=True), units, strict=True
            )
        ]

    def _add_state(self) -> None:
        atoms, graph = self._atoms, self._atoms.graph
        users = users_of_state(atoms)
        for name, spec in graph.parameters.items():
            size, used_at = spec.num_bytes(atoms.sizes), users[name]
            self.weights.distinct(used_at, size + atoms.casts.get(name, 0))
            if not spec.requires_grad:
                continue
            self.gradients.distinct(used_at, size)
            self.stepped.atom(min(used_at), size)
            self.largest.add(min(used_at), size)
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


def users_of_state(atoms: Atoms) -> dict[str, set[int]]:
    """Return the atoms that need each parameter and buffer."""
    users: dict[str, set[int]] = {}
    for atom, node in atoms.work:
        for name in (*node.parameters, *node.buffers, *node.buffers_written):
            users.setdefault(name, set()).add(atom)
    for node in atoms.copied:
        for name in (*node.parameters, *node.buffers, *node.buffers_written):
            users.setdefault(name, set()).update(atoms.reads[node.name])
    for name, home in unused_state(atoms.graph).items():
        users[name] = {atoms.of_position[home]}
    return users

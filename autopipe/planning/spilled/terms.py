"""``SpilledTerms``: the bytes of a stage that takes turns with others on its device, besides those of ``byte_sums``.

Slabs contain tensors that are aligned to 64 bytes, so many small ones take more there than elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopipe.planning.cost.atoms import Atoms
from autopipe.planning.cost.byte_sums import users_of_state
from autopipe.planning.cost.pair_sum import Array, PairSum

ALIGNMENT = 64
"""Of the tensors of a slab, in bytes (``runtime.spilling.flat``)."""


@dataclass(frozen=True, slots=True)
class SpilledTerms:
    """The bytes of one stage."""

    slab: int  # its weights, in a slab
    optimizer: int  # its optimizer state, in a slab
    casts: int  # the 16-bit casts of its weights
    inputs: int  # per microbatch: batch tensors and input-only results, kept for the backward


class SpilledSums:
    """The contributions of a graph to ``SpilledTerms``, for every pair of cuts or the stages of one plan."""

    def __init__(self, atoms: Atoms, optimizer_bytes_per_byte: float) -> None:
        self._atoms, self._per_byte = atoms, optimizer_bytes_per_byte
        graph, users, n = atoms.graph, users_of_state(atoms), atoms.count
        self._slab, self._stepped, self._casts, self._inputs = PairSum(n), PairSum(n), PairSum(n), PairSum(n)
        for name, spec in graph.parameters.items():
            size = -(-spec.num_bytes(atoms.sizes) // ALIGNMENT) * ALIGNMENT
            self._slab.distinct(users[name], size)
            self._casts.distinct(users[name], atoms.casts.get(name, 0))
            if spec.requires_grad:
                self._stepped.atom(min(users[name]), size)
        for entry in graph.inputs:
            self._inputs.distinct(atoms.reads.get(entry.name, ()), atoms.input_bytes[entry.name])
        for node in atoms.copied:
            self._inputs.distinct(atoms.reads[node.name], atoms.num_bytes(node.name))
        self.buffers = sum(spec.num_bytes(atoms.sizes) for spec in graph.buffers.values())
        """Bytes of all buffers of the model, which remain on the device."""

    def slabs(self) -> Array:
        """Return the bytes of the weights of every pair of cuts."""
        return self._slab.table()

    def optimizer(self) -> Array:
        """Return the bytes of the optimizer state of every pair of cuts."""
        return np.ceil(self._per_byte * self._stepped.table())

    def casts(self) -> Array:
        """Return the bytes of the casts of every pair of cuts."""
        return self._casts.table()

    def along(self, starts: Sequence[int]) -> list[SpilledTerms]:
        """Return the terms of the stages of a plan that start at these node positions."""
        atom_at = {position: atom for atom, position in enumerate(self._atoms.edges)}
        edges = [*(atom_at[start] for start in starts), self._atoms.count]
        columns = (term.along(edges).tolist() for term in (self._slab, self._stepped, self._casts, self._inputs))
        return [
            SpilledTerms(slab, math.ceil(self._per_byte * stepped), casts, inputs)
            for slab, stepped, casts, inputs in zip(*columns, strict=True)
        ]


def stepping_bytes(gradients: Any, largest: Any, optimizer_bytes_per_byte: float) -> Any:
    """Return the bytes of a step besides weights, gradients and state, of one stage or of all pairs of cuts.

    Optimizers step either all parameters at once, with a temporary tensor of each, or one after the other, with two of
    the largest. ``largest``: the optimizer state of the largest parameter.
    """
    one = largest / optimizer_bytes_per_byte if optimizer_bytes_per_byte else largest
    return np.maximum(gradients, 2 * one)

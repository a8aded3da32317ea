"""``Tables``: the seconds, traffic and bytes of a stage for every pair of cuts. ``pair_sum`` explains how."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopipe.planning.cost.atoms import Atoms
from autopipe.planning.cost.byte_sums import ByteSums, ByteTables
from autopipe.planning.cost.pair_sum import Array, PairSum


@dataclass(frozen=True)
class Tables:
    """Per microbatch, for a stage of atoms i..j-1: arrays of shape (n + 1, n + 1) in seconds and bytes."""

    edges: tuple[int, ...]  # the node position of every atom's start, and the end
    forward_seconds: Array  # with the input-only nodes that the stage computes itself
    backward_seconds: Array
    received: Array  # bytes; a value whose gradient is sent back counts twice
    sent: Array  # bytes, likewise
    tied_bytes: Array  # trained parameters that other stages use as well
    memory: ByteTables

    @property
    def num_atoms(self) -> int:
        """The number of atoms: one more than the legal cuts."""
        return len(self.edges) - 1


def build_tables(atoms: Atoms, sums: ByteSums) -> Tables:
    """Return the tables of a graph at one microbatch size."""
    received, sent = _messages(atoms)
    return Tables(
        atoms.edges,
        _seconds(atoms, "forward_seconds", lambda atom: atom, atoms.count),
        _seconds(atoms, "backward_seconds", lambda atom: atom, atoms.count),
        received.table(),
        sent.table(),
        sums.tied.table(),
        sums.tables(),
    )


def tables_without(tables: Tables, atoms: Atoms, position: int) -> Tables:
    """Return the tables without the cut at a node position, equal to those of a graph without it.

    ``atoms``: of ``tables``. Bytes are whole numbers, so their tables lose a row and a column. Seconds are added again.
    """
    cut, count = tables.edges.index(position), tables.num_atoms - 1

    def fewer(table: Array) -> Array:
        rest: Array = np.delete(np.delete(table, cut, axis=0), cut, axis=1)
        return rest

    def merged(atom: int) -> int:
        return atom - (atom >= cut)

    memory = {field.name: fewer(getattr(tables.memory, field.name)) for field in dataclasses.fields(tables.memory)}
    return Tables(
        tuple(edge for edge in tables.edges if edge != position),
        _seconds(atoms, "forward_seconds", merged, count),
        _seconds(atoms, "backward_seconds", merged, count),
        fewer(tables.received),
        fewer(tables.sent),
        fewer(tables.tied_bytes),
        dataclasses.replace(tables.memory, **memory),
    )


def _messages(atoms: Atoms) -> tuple[PairSum, PairSum]:
    """Return the bytes received and sent, gradients included."""
    received, sent = PairSum(atoms.count), PairSum(atoms.count)
    for producer, node in atoms.work:
        later = atoms.later_readers(node.name, producer)
        if node.spec is None or not later:
            continue
        both_ways = atoms.num_bytes(node.name) * (2 if node.spec.requires_grad else 1)
        received.distinct(later, both_ways, after=producer)
        sent.rectangle(0, producer, producer + 1, max(later), both_ways)
    return received, sent


def _seconds(atoms: Atoms, field: str, merged: Callable[[int], int], count: int) -> Array:
    """Return the seconds of every pair of cuts. ``merged``: the atom, of ``count``, that contains one of ``atoms``."""
    extra = PairSum(count)
    for node in atoms.copied:
        extra.distinct(map(merged, atoms.reads[node.name]), getattr(atoms.costs[node.name], field))
    at = [merged(atom) + 1 for atom, _ in atoms.work]
    seconds = [getattr(atoms.costs[node.name], field) for _, node in atoms.work]
    prefix = np.bincount(at, weights=seconds, minlength=count + 1).cumsum()
    work: Array = np.maximum(prefix[None, :] - prefix[:, None], 0.0)
    return work + extra.table()

"""``StoredValue``: one memory that a cut can separate from its readers, and who counts it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from autopipe.planning.cost.atoms import Atoms
from autopipe.planning.cost.pair_sum import PairSum


@dataclass
class StoredValue:
    """One memory, under all its names, and how a cut changes who counts it.

    A profile counts a tensor at the first node that keeps it for its backward. A stage that has the memory from
    elsewhere counts it in ``kept`` instead. A stage that sends a value keeps it until the backward that starts from it,
    even if none of its own nodes does.
    """

    producer: int  # the atom that produces it; -1: every stage has it
    size: int  # bytes
    keeper: int | None  # the atom of the first node that keeps it; None if no node does
    keeper_position: int = -1  # the position of that node
    reads: set[int] = field(default_factory=set)  # the later atoms that read it
    # for each name through which a gradient comes back: the atom that produces it and the last one that reads it
    sent: list[tuple[int, int]] = field(default_factory=list)

    @property
    def last_sent(self) -> int | None:
        """The last atom to which it may be sent with a gradient; None if no gradient comes back."""
        return max((last for _, last in self.sent), default=None)

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


def stored_values(atoms: Atoms) -> Iterator[StoredValue]:
    """Yield the memory of all values that a cut can separate from their readers, once under all its names."""
    storage = atoms.cuts.storage
    keepers: dict[str, int] = {}
    for value, name in atoms.keepers.items():
        base, at = storage(value), atoms.graph.position[name]
        keepers[base] = min(at, keepers.get(base, at))
    values: dict[str, StoredValue] = {}
    names = [(entry.name, -1) for entry in atoms.graph.inputs] + [(node.name, -1) for node in atoms.copied]
    for name, producer in [*names, *((node.name, atom) for atom, node in atoms.work if node.spec is not None)]:
        later = atoms.later_readers(name, producer)
        if not later:
            continue
        base = storage(name)
        if base not in values:
            place = keepers.get(base)
            keeper = None if place is None else atoms.of_position[place]
            size, producer_atom = atoms.num_bytes(base), atoms.produced_at(base)
            values[base] = StoredValue(producer_atom, size, keeper, -1 if place is None else place)
        values[base].reads |= later
        if producer >= 0 and atoms.carries_gradient(name):
            values[base].sent.append((producer, max(later)))
    yield from values.values()

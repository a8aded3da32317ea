"""``DigestExchange``: verifies before each step that all ranks have read the same minibatches.

At the start of a window, each rank writes the digests of its minibatches into its row of a table of zeros. The tables
are summed in the background while the ranks compute, and compared just before the first step of the window. A
difference ends the run: the ranks that differ from the majority fail with it, the others because of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from autopipe.errors import RunError
from autopipe.runtime.batches.source import Taken
from autopipe.runtime.transport.base import Pending, Transport, TransportClosed

_WIDTH = 5  # whether there is a minibatch, its epoch, its position, the two halves of its digest
Row = tuple[int, ...]


_REMEDY = (
    "give every process the same data: seed it (numpy.random.default_rng(SEED), torch.Generator().manual_seed(SEED)), "
    "sort what comes from a set or a directory, and give every host the same files; or let rank 0 read for all: omit "
    "--data-reader each"
)


class OtherRanksDiffer(TransportClosed):
    """Another rank has read a different minibatch. It fails, and this rank fails because of it."""


class DigestExchange:
    """One rank's end. ``evaluating``: the data is evaluation data."""

    def __init__(self, transport: Transport, *, evaluating: bool = False) -> None:
        self._transport, self._evaluating = transport, evaluating
        self._first = 0
        self._pending: Pending | None = None

    def start(self, first: int, taken: Sequence[Taken], length: int) -> None:
        """Start to compare what this rank has read for the steps from ``first`` to before ``first + length``.

        Every rank calls it with the same ``first`` and ``length``. ``taken`` is shorter if its data has ended.
        """
        world = self._transport.world_size
        if world == 1:
            return
        table = torch.zeros(world, length, _WIDTH, dtype=torch.int64)
        for index, minibatch in enumerate(taken):
            halves = (int.from_bytes(minibatch.digest[at : at + 8], "big", signed=True) for at in (0, 8))
            row = (1, minibatch.place.epoch, minibatch.place.position - 1, *halves)
            table[self._transport.rank, index] = torch.tensor(row)
        self._first, self._pending = first, self._transport.start_all_reduce(range(world), table)

    def settle(self) -> None:
        """Wait until all ranks are known to have read the same.

        Raises: RunError on a rank that has read another minibatch than the majority; OtherRanksDiffer on the others.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        table = pending.wait()
        if bool((table == table[:1]).all()):
            return
        index = int((table != table[:1]).any(dim=2).any(dim=0).nonzero()[0])
        rows: list[Row] = [tuple(row) for row in table[:, index].tolist()]
        (usual, _), *_ = Counter(rows).most_common()  # in a tie, the first
        odd = [rank for rank, row in enumerate(rows) if row != usual]
        text = self._difference(odd, rows, rows.index(usual), self._first + index)
        kind = RunError if self._transport.rank in odd else OtherRanksDiffer
        raise kind(text, remedy=_REMEDY)

    def _difference(self, odd: Sequence[int], rows: Sequence[Row], reference: int, step: int) -> str:
        who = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))}"
        what = "in evaluation" if self._evaluating else f"for step {step + 1}"
        mine, theirs = _place_of(rows[odd[0]]), _place_of(rows[reference])
        if mine == theirs:
            return f"{who} read another minibatch {what} than rank {reference} did ({mine})"
        return f"{who} reached {mine} {what}, and rank {reference} reached {theirs}"


def _place_of(row: Row) -> str:
    present, epoch, position = row[:3]
    return f"minibatch {position} of epoch {epoch}" if present else "the end of the data"

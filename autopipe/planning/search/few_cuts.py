"""The cuts that a search of a large graph considers.

A search evaluates every pair of cuts. A transformer of 80 blocks has thousands of legal cuts, most of them inside a
layer, where more tensors cross than between two layers. Of more than ``MOST_CUTS``, the ``KEPT_CUTS`` that send the
least are kept.
"""

from __future__ import annotations

import functools

from autopipe.ir.cuts import Cuts

MOST_CUTS, KEPT_CUTS = 512, 192
CUTS_PER_STAGE = 8


class FewCuts(Cuts):
    """At most ``most`` of the legal cuts of a graph: those that send the least for one sample.

    Of cuts that send equally much and are too many, every k-th is kept, so that all parts of the graph have some.
    """

    def __init__(self, cuts: Cuts, most: int) -> None:
        super().__init__(cuts.graph)
        self._cuts, self._most = cuts, most

    @functools.cached_property
    def legal(self) -> tuple[int, ...]:
        """The positions that are kept, ascending."""
        groups: dict[int, list[int]] = {}
        for position in self._cuts.legal:
            groups.setdefault(self.crossing_bytes(position, 1), []).append(position)
        kept: list[int] = []
        for _, positions in sorted(groups.items()):
            room = self._most - len(kept)
            kept.extend(positions[:: -(-len(positions) // room)] if room else ())
            if len(positions) >= room:
                break
        return tuple(sorted(kept))


def cuts_to_search(cuts: Cuts, num_stages: int) -> Cuts:
    """Return the cuts themselves, or a part of them if they are more than a search should evaluate."""
    if len(cuts.legal) <= max(MOST_CUTS, CUTS_PER_STAGE * num_stages):
        return cuts
    fewer = FewCuts(cuts, max(KEPT_CUTS, CUTS_PER_STAGE * num_stages))
    return fewer if len(fewer.legal) >= CUTS_PER_STAGE * num_stages else cuts

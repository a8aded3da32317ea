"""The cuts that a search of a large graph considers.

A search evaluates every pair of cuts. A transformer of 80 blocks has thousands of legal cuts, most of them inside a
layer, where more tensors cross than between two layers. Of more than ``MOST_CUTS``, these are kept:

- those that send the least. If equally many bytes cross too many cuts, these are spread over the graph;
- the one that sends the least in each of ``KEPT_CUTS`` parts of the graph that are equally large. So for every legal
  cut, one that sends no more is kept nearby: the stages it ends and begins take little more time and memory.
"""

from __future__ import annotations

import functools
import itertools
import math

from autopipe.ir.cuts import Cuts
from autopipe.ir.profile import Profile

MOST_CUTS, KEPT_CUTS = 512, 128
CUTS_PER_STAGE = 8
_MOST_RECENT = 8


class FewCuts(Cuts):
    """At most ``2 * most`` of the legal cuts of a graph: see the module. ``profile``: of that graph."""

    def __init__(self, cuts: Cuts, profile: Profile, most: int) -> None:
        super().__init__(cuts.graph)
        self._cuts, self._profile, self._most = cuts, profile, most

    def is_of(self, cuts: Cuts, profile: Profile, most: int) -> bool:
        """Return whether it is a part of these cuts, for these arguments."""
        return self._cuts is cuts and self._profile is profile and self._most == most

    @functools.cached_property
    def legal(self) -> tuple[int, ...]:
        """The positions that are kept, ascending."""
        return tuple(sorted({*self._cheapest(), *self._cheapest_of_parts()}))

    def _cheapest(self) -> list[int]:
        """Return ``most`` positions. Of cuts that send equally much and are too many, every k-th is kept."""
        groups: dict[int, list[int]] = {}
        for position in self._cuts.legal:
            groups.setdefault(self.crossing_bytes(position, 1), []).append(position)
        kept: list[int] = []
        for _, positions in sorted(groups.items()):
            room = self._most - len(kept)
            kept.extend(positions[:: -(-len(positions) // room)] if room else ())
            if len(positions) >= room:
                break
        return kept

    def _cheapest_of_parts(self) -> list[int]:
        """Return at most ``most`` positions: one of each part that has a legal cut."""
        sizes = _sizes(self._profile)
        before = [0.0, *itertools.accumulate(sizes)]
        part = before[-1] / self._most
        parts: dict[int, list[int]] = {}
        for position in self._cuts.legal:
            index = int(before[position] / part) if part else 0
            parts.setdefault(min(index, self._most - 1), []).append(position)
        return [min(positions, key=lambda p: self.crossing_bytes(p, 1)) for positions in parts.values()]


def _sizes(profile: Profile) -> list[float]:
    """Return the size of each node: the sum of its shares of the time, of what is kept, and of the parameters."""
    graph, costs = profile.graph, profile.measurements[-1].costs
    seconds, kept, own = [], [], []
    counted: set[str] = set()
    for node in graph.nodes:
        cost = costs[node.name]
        seconds.append(cost.forward_seconds + cost.backward_seconds)
        kept.append(float(cost.saved_bytes))
        first = [name for name in node.parameters if name not in counted]
        counted.update(first)
        own.append(float(sum(graph.parameters[name].num_bytes({}) for name in first)))
    columns = [[value / (math.fsum(column) or 1.0) for value in column] for column in (seconds, kept, own)]
    return [math.fsum(row) for row in zip(*columns, strict=True)]


_RECENT: list[FewCuts] = []  # the newest last; what ``cost.tables`` keeps is kept for these objects


def _few(cuts: Cuts, profile: Profile, most: int) -> FewCuts:
    """Return a part of the cuts, the same object for searches that follow one another."""
    known = next((few for few in _RECENT if few.is_of(cuts, profile, most)), None) or FewCuts(cuts, profile, most)
    _RECENT[:] = [*(few for few in _RECENT if few is not known), known][-_MOST_RECENT:]
    return known


def cuts_to_search(cuts: Cuts, profile: Profile, num_stages: int) -> Cuts:
    """Return the cuts themselves, or a part of them if they are more than a search should evaluate."""
    if len(cuts.legal) <= max(MOST_CUTS, CUTS_PER_STAGE * num_stages):
        return cuts
    fewer = _few(cuts, profile, max(KEPT_CUTS, CUTS_PER_STAGE * num_stages))
    return fewer if len(fewer.legal) >= CUTS_PER_STAGE * num_stages else cuts

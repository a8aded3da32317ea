"""The recompute modes of a stage, with bytes and seconds by block counted naively, for the planner's brute force."""

from __future__ import annotations

import functools

from autopipe.ir.cuts import Cuts
from autopipe.planning.cost.atoms import Atoms


def modes_by_hand(graph, setting, units, *, split=False):
    """Return the recompute modes of a setting, the preferred one first."""
    by_block = ["block"] if units and not split else []
    if setting == "always":
        return [*by_block, "stage"]
    if setting != "auto":
        return [setting]
    kept = [] if by_block and any(node.checkpoint for node in graph.nodes) else ["never"]
    return [*kept, *by_block, "stage"]


def once_per_profile(function):
    """Remember the results for the last profile, which cannot be hashed."""
    known = {}

    @functools.wraps(function)
    def remembered(profile, *rest):
        if known.get("profile") is not profile:
            known.clear()
            known["profile"] = profile
        if rest not in known:
            known[rest] = function(profile, *rest)
        return known[rest]

    return remembered


@once_per_profile
def units_of(profile, size):
    """Return the units that the planner chose, as ranges of nodes."""
    atoms = Atoms(profile.graph, Cuts(profile.graph), profile.at(size))
    return [(atoms.edges[a], atoms.edges[b]) for a, b in atoms.units.spans]


@once_per_profile
def block_by_hand(profile, size, start, stop):
    """Return (bytes kept of a microbatch, most bytes in a unit, seconds of the units, those of the last) of a stage."""
    graph, costs, keepers = profile.graph, profile.at(size).costs, profile.at(size).keepers
    cuts, sizes, work = Cuts(graph), graph.sizes(size), [n for n in graph.nodes if not n.input_only]
    units = units_of(profile, size)
    place = graph.position
    edges = [0, *cuts.legal, len(graph.nodes)]

    def unit(position):
        return next((k for k, (a, b) in enumerate(units) if a <= position < b), None)

    def atom(position):
        return next(k for k in range(len(edges) - 1) if edges[k] <= position < edges[k + 1])

    def own(value):
        return value in place and not graph.nodes[place[value]].input_only

    def bytes_of(value):
        if value not in place:
            return graph.inputs[0].spec.num_bytes(sizes)
        node = graph.nodes[place[value]]
        if node.input_only:
            return 0 if node.storage else costs[value].output_bytes
        return 0 if node.spec is None else node.spec.num_bytes(sizes)

    def needs(node):
        """Return all that a node reads, also through input-only nodes."""
        todo, seen = [*node.inputs, *(v for v in node.after if not own(v) and v in place)], set()
        while todo:
            value = todo.pop()
            if value not in seen:
                seen.add(value)
                if value in place and not own(value):
                    todo += [*graph.nodes[place[value]].inputs, *graph.nodes[place[value]].after]
        return seen

    memories = {}
    for value in ("x", *place):
        memories.setdefault(cuts.storage(value), []).append(value)
    readers = {value: [place[n.name] for n in work if value in needs(n)] for value in ("x", *place)}
    for value in graph.outputs:
        readers[value].append(len(graph.nodes) - 1)
    inside = {n.name: costs[n.name].saved_bytes for n in work if unit(place[n.name]) is not None}
    crossing = sum(costs[n.name].saved_bytes for n in work if start <= place[n.name] < stop and n.name not in inside)
    for base, names in memories.items():
        produced = place[base] if own(base) else -1
        behind = {v: [r for r in readers[v] if not own(v) or atom(r) > atom(place[v])] for v in names}
        behind = {v: r for v, r in behind.items() if v not in place or graph.nodes[place[v]].spec or not own(v)}
        reads = [r for v in behind for r in behind[v]]
        if not reads:
            continue
        kept_at = min((place[keepers[v]] for v in names if v in keepers), default=None)
        of_unit = (
            produced >= 0 and unit(produced) is not None and kept_at is not None and unit(produced) == unit(kept_at)
        )
        if kept_at is not None and unit(kept_at) is not None and not of_unit:
            keeper = graph.nodes[kept_at].name
            inside[keeper] = max(inside[keeper] - bytes_of(base), 0)
        counted = kept_at is not None and unit(kept_at) is None and start <= kept_at < stop
        if start <= produced < stop:
            enters = [r for r in reads if start <= r < stop and unit(r) is not None and unit(r) != unit(produced)]
            sent = [
                v
                for v in behind
                if own(v) and graph.nodes[place[v]].spec.requires_grad and place[v] < stop <= max(behind[v], default=-1)
            ]
            crossing += bytes_of(base) if (enters or sent) and not counted else 0
        elif produced < start and counted and any(start <= r < stop for r in reads):
            crossing -= bytes_of(base)
    most, saved, current = 0, 0, object()
    again, last_unit = 0.0, 0.0
    for node in work:
        position = place[node.name]
        if not start <= position < stop:
            continue
        if unit(position) is None or unit(position) != current:
            saved, last_unit = 0, 0.0
        current = unit(position)
        saved += inside.get(node.name, 0)
        most = max(most, saved + costs[node.name].workspace_bytes)
        if current is not None:
            again += costs[node.name].forward_seconds
            last_unit += costs[node.name].forward_seconds
    keeps = current is not None and not any(n.checkpoint for n in graph.nodes)
    return max(crossing, 0), most, again, last_unit if keeps else 0.0

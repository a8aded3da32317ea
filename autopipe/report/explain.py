"""Why a plan cuts where it does: what bounds it, and what moving each cut to its neighbours would cost."""

from __future__ import annotations

from autopipe.ir.cluster import Cluster
from autopipe.ir.cuts import Cuts
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Measurement, Profile
from autopipe.report.text import in_bytes, in_seconds


def explain(plan: Plan, profile: Profile, cluster: Cluster) -> tuple[str, ...]:
    """Return sentences: the slowest stage, the tightest memory, and each cut with its legal neighbours.

    Seconds of the neighbours are of the stages' own work; what crosses is given in bytes beside it.
    """
    slowest = max(plan.stages, key=lambda stage: (stage.seconds / stage.replicas, -stage.index))
    span = f"{slowest.first} .. {slowest.last}"
    lines = [f"bound by stage {slowest.index} ({span}): {in_seconds(slowest.seconds)} a microbatch"]
    limited = [stage for stage in plan.stages if cluster.device(stage.ranks[0]).memory_bytes]
    if limited:
        tight = max(limited, key=lambda stage: stage.peak_bytes / cluster.device(stage.ranks[0]).memory_bytes)
        limit = cluster.device(tight.ranks[0]).memory_bytes
        lines.append(
            f"tightest memory: stage {tight.index} needs {in_bytes(tight.peak_bytes)} of {in_bytes(limit)}, "
            f"{in_bytes(limit - tight.peak_bytes)} to spare"
        )
    cuts = Cuts(profile.graph)
    costs = profile.at(plan.microbatch_size)
    for before, after in zip(plan.stages, plan.stages[1:], strict=False):
        lines.extend(_cut(plan, profile, cuts, costs, (before.start, after.start, after.stop)))
    return tuple(lines)


def _cut(plan: Plan, profile: Profile, cuts: Cuts, costs: Measurement, edges: tuple[int, int, int]) -> list[str]:
    start, chosen, stop = edges
    legal = [position for position in cuts.legal if start < position < stop]
    if chosen not in legal:
        return []
    place = legal.index(chosen)
    lines = [
        f"cut before {profile.graph.nodes[chosen].name}: {_both(profile, costs, edges)}, {_bytes(cuts, costs, chosen)}"
    ]
    for name, index in (("earlier", place - 1), ("later", place + 1)):
        if 0 <= index < len(legal):
            moved = start, legal[index], stop
            node = profile.graph.nodes[legal[index]].name
            lines.append(
                f"  {name}, before {node}: {_both(profile, costs, moved)}, {_bytes(cuts, costs, legal[index])}"
            )
    return lines


def _both(profile: Profile, costs: Measurement, edges: tuple[int, int, int]) -> str:
    """Return the two sides' seconds."""
    sides = []
    for first, last in ((edges[0], edges[1]), (edges[1], edges[2])):
        nodes = profile.graph.nodes[first:last]
        sides.append(sum(costs.costs[n.name].forward_seconds + costs.costs[n.name].backward_seconds for n in nodes))
    return f"{in_seconds(sides[0])} | {in_seconds(sides[1])}"


def _bytes(cuts: Cuts, costs: Measurement, position: int) -> str:
    values = [value for value in cuts.crossing[position] if value in costs.costs]
    return f"{in_bytes(sum(costs.costs[value].output_bytes for value in values))} cross ({', '.join(values) or 'none'})"

"""A lower bound of the simulated time of one minibatch, for any schedule with a flush, from the costs alone."""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.schedules.costs import Costs, EdgeCosts

_Edge = tuple[int, int]


def least_seconds(costs: Costs, num_microbatches: int, forward: Sequence[_Edge], backward: Sequence[_Edge]) -> float:
    """Return a time that ``simulate`` cannot be below, in any order of the m microbatches, with a rank for each stage.

    Stage s begins when the first microbatch has passed the stages that it receives from. It then computes all m
    forwards and backwards, with their sends and receives, and ends with a backward. That microbatch must still pass the
    stages that receive its gradient, and each steps. No backward may be split.

    ``forward`` and ``backward``: the edges of the messages, (from stage, to stage). Sums are rounded in another order
    than those of ``simulate``, so the bound is a little lower than their sum.
    """
    count, stages, m = len(costs.stages), costs.stages, num_microbatches
    into: list[list[int]] = [[] for _ in range(count)]  # by stage, the stages that it receives from
    out: list[list[int]] = [[] for _ in range(count)]  # and those to which it sends gradients
    per_microbatch = [stage.forward_seconds + stage.backward_seconds for stage in stages]
    missing = [0.0] * count  # the receives before the first forward, and the sends behind the last backward
    for a, b in forward:
        into[b].append(a)
        per_microbatch[a] += _edge(costs, a, b).send_seconds
        per_microbatch[b] += _edge(costs, a, b).receive_seconds
        missing[b] += _edge(costs, a, b).receive_seconds
    for a, b in backward:
        out[a].append(b)
        per_microbatch[a] += _edge(costs, a, b).send_seconds
        per_microbatch[b] += _edge(costs, a, b).receive_seconds
        missing[a] += _edge(costs, a, b).send_seconds
    begin, rest = [0.0] * count, [stage.step_seconds for stage in stages]
    for s in range(count):
        begin[s] = max((begin[a] + stages[a].forward_seconds + _passing(costs, a, s) for a in into[s]), default=0.0)
        behind = (_passing(costs, s, b) + stages[b].backward_seconds + rest[b] for b in out[s])
        rest[s] = max(rest[s], *behind) if out[s] else rest[s]
    return (1 - 1e-9) * max(begin[s] + m * per_microbatch[s] - missing[s] + rest[s] for s in range(count))


def _edge(costs: Costs, a: int, b: int) -> EdgeCosts:
    return costs.edges.get((a, b), EdgeCosts())


def _passing(costs: Costs, a: int, b: int) -> float:
    """Return the seconds from the end of a computation to the start of the one that needs its message."""
    edge = _edge(costs, a, b)
    return edge.send_seconds + edge.occupancy_seconds + edge.latency_seconds + edge.receive_seconds

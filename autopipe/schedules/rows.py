"""What the schedules are put together from: a rank's share of the microbatches, 1F1B order, and the end of a minibatch.

Warm-up. Stage ``s`` with ``r_s`` replicas sends ``w_s`` microbatches a replica forward before forwards and backwards
alternate, ``w_s = floor((depth * (N_s - r_s) + r_s - 1) / r_s)`` with ``N_s`` the ranks of stage s and all later ones.
At depth 1 that is PipeDream's ``ceil(N_s / r_s) - 1``, and without replicas ``p - 1 - s``.

Why it cannot deadlock, for any replica counts. Number the microbatches of a run 0, 1, 2, ... Then B of g at stage u
waits, on its own rank, for F of at most ``g + w_u r_u``, and that F, at a stage v <= u, waits for B of at most
``g + w_u r_u - (w_v + 1) r_v``; where replicas meet for a reduction first, at most ``g + w_u r_u - w_v r_v - 1``. The
warm-ups satisfy ``w_u r_u <= w_v r_v`` for v <= u, so what a B waits for at the same stage or an earlier one is always
an earlier microbatch: there is no cycle.

Source: PipeDream, SOSP 2019, section 3.2 (NOAM), and 1F1B-RR.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from autopipe.ir.schedule import Instruction, Request, Schedule

T = TypeVar("T")


def own_microbatches(request: Request, stage: int, rank: int, minibatch: int) -> range:
    """Return the microbatches of a minibatch that a rank runs at a stage: round robin over its replicas."""
    ranks = request.stage_ranks[stage]
    first = (ranks.index(rank) - minibatch * request.num_microbatches) % len(ranks)
    return range(first, request.num_microbatches, len(ranks))


def minibatches(request: Request) -> range:
    """Return the minibatches of the window."""
    return range(request.first_minibatch, request.first_minibatch + request.num_minibatches)


def stages_of(request: Request, rank: int) -> tuple[int, ...]:
    """Return the stages that a rank runs, ascending."""
    return tuple(stage for stage, ranks in enumerate(request.stage_ranks) if rank in ranks)


def warmups(request: Request, depth: int = 1) -> tuple[int, ...]:
    """Return for every stage how many microbatches each of its replicas sends forward before its first backward."""
    result, ranks_from_here = [], 0
    for ranks in reversed(request.stage_ranks):
        result.append((depth * ranks_from_here + len(ranks) - 1) // len(ranks))
        ranks_from_here += len(ranks)
    return tuple(reversed(result))


def alternate(forwards: Sequence[T], warmup: int, backwards: Sequence[T] | None = None) -> list[tuple[str, T]]:
    """Return 1F1B order: ``warmup`` forwards, then one forward and one backward in turn, then the backwards left.

    ``backwards``: their order, where it is not that of the forwards.
    """
    backwards = forwards if backwards is None else backwards
    order = [("F", item) for item in forwards[:warmup]]
    for item, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [("F", item), ("B", backward)]
    return order + [("B", item) for item in backwards[max(len(forwards) - warmup, 0) :]]


def end_of_minibatch(request: Request, stage: int, minibatch: int) -> list[Instruction]:
    """Return the reduction, where the stage is replicated, and the optimizer step."""
    step = Instruction("S", stage, minibatch, weight_version=minibatch)
    return [Instruction("R", stage, minibatch), step] if len(request.stage_ranks[stage]) > 1 else [step]


def flushed(
    name: str,
    request: Request,
    order: Callable[[int, int], Sequence[tuple[str, int, int]]],
    in_flight: Sequence[int],
) -> Schedule:
    """Return the synchronous schedule whose ranks compute in this order and step when a minibatch is through.

    ``order(rank, minibatch)``: (op, stage, microbatch). ``in_flight``: see ``Schedule``.
    """
    rows = []
    for rank in range(request.num_ranks):
        row: list[Instruction] = []
        for t in minibatches(request):
            row += [Instruction(op, stage, t, j, t) for op, stage, j in order(rank, t)]
            for stage in stages_of(request, rank):
                row += end_of_minibatch(request, stage, t)
        rows.append(tuple(row))
    return Schedule(name, request, tuple(rows), (0,) * request.num_stages, tuple(in_flight))


def unflushed(
    name: str, request: Request, warmup: Sequence[int], staleness: Sequence[int], in_flight: Sequence[int]
) -> Schedule:
    """Return the schedule in which 1F1B runs on through the ends of minibatches, one stage on a rank.

    Minibatch t uses version ``max(t - staleness, 0)``. The reduction follows the rank's last backward of a minibatch,
    and the step the reduction. Where the stage is replicated the step may come a forward later, which then overlaps
    with the reduction: but before a forward that needs its version, before a backward of another minibatch, whose
    gradient would mix with this one's, and only where no earlier stage would hold that forward back if all stages met
    at every step, as they do to agree on a clipping factor: ``(w_s + 1) r_s <= w_v r_v`` for v < s.
    """
    rows: list[tuple[Instruction, ...]] = [()] * request.num_ranks
    ahead = None  # the fewest microbatches that an earlier stage sends ahead
    for stage, ranks in enumerate(request.stage_ranks):
        late = len(ranks) > 1 and (ahead is None or (warmup[stage] + 1) * len(ranks) <= ahead)
        ahead = min(warmup[stage] * len(ranks), warmup[stage] * len(ranks) if ahead is None else ahead)
        for rank in ranks:
            share = [(t, j) for t in minibatches(request) for j in own_microbatches(request, stage, rank, t)]
            rows[rank] = _unflushed_row(request, stage, share, warmup[stage], staleness[stage], late=late)
    return Schedule(name, request, tuple(rows), tuple(staleness), tuple(in_flight))


def _unflushed_row(
    request: Request, stage: int, share: Sequence[tuple[int, int]], warmup: int, staleness: int, *, late: bool
) -> tuple[Instruction, ...]:
    row: list[Instruction] = []
    ends = deque(minibatches(request))  # the minibatches whose end is still to come
    waiting: list[Instruction] = []  # a step that is due, but may wait
    done = 0
    counts = Counter(t for t, _ in share)
    last = dict(zip(ends, itertools.accumulate(counts[t] for t in ends), strict=True))  # backwards until t is through
    for position, (op, (t, j)) in enumerate(alternate(share, warmup)):
        # behind the warm-up every forward is followed by a backward: minibatches end before that forward
        while ends and last[ends[0]] <= done and position >= min(warmup, len(share)):
            *reduction, step = end_of_minibatch(request, stage, ends.popleft())
            row += [*waiting, *reduction]
            waiting = [step]
        version = max(t - staleness, 0)
        if waiting and (not late or op == "B" or version > waiting[0].weight_version):
            row += waiting
            waiting = []
        row.append(Instruction(op, stage, t, j, version))
        done += op == "B"
    row += waiting
    for t in ends:
        row += end_of_minibatch(request, stage, t)
    return tuple(row)

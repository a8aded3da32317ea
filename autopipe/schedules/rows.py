"""What the schedules are put together from: a rank's share of the microbatches, 1F1B order, and the end of a minibatch.

Warm-up. Stage ``s`` with ``r_s`` replicas sends ``w_s`` microbatches a replica forward before forwards and backwards
alternate, ``w_s = floor((depth * (N_s - r_s) + r_s - 1) / r_s)`` with ``N_s`` the ranks of stage s and all later ones.
At depth 1 that is PipeDream's ``ceil(N_s / r_s) - 1``, and without replicas ``p - 1 - s``.

Why it cannot deadlock, for any replica counts. Number the microbatches of a run 0, 1, 2, ... Then B of g at stage u
waits, on its own rank, for F of at most ``g + w_u r_u``, and that F, at a stage v <= u, waits for B of at most
``g + w_u r_u - (w_v + 1) r_v``; where replicas meet for a reduction first, at most ``g + w_u r_u - w_v r_v - 1``. The
warm-ups satisfy ``w_u r_u <= w_v r_v`` for v <= u, so what a B waits for at the same stage or an earlier one is always
an earlier microbatch, so no cycle exists.

Source: PipeDream, SOSP 2019, section 3.2 (NOAM), and 1F1B-RR.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from autopipe.ir.schedule import Instruction, Schedule, ScheduleSpec

T = TypeVar("T")


def own_microbatches(request: ScheduleSpec, stage: int, rank: int, minibatch: int) -> range:
    """Return the microbatches of a minibatch that a rank runs at a stage: round robin over its replicas."""
    ranks = request.stage_ranks[stage]
    first = (ranks.index(rank) - minibatch * request.num_microbatches) % len(ranks)
    return range(first, request.num_microbatches, len(ranks))


def minibatches(request: ScheduleSpec) -> range:
    """Return the minibatches of the window."""
    return range(request.first_minibatch, request.first_minibatch + request.num_minibatches)


def stages_of(request: ScheduleSpec, rank: int) -> tuple[int, ...]:
    """Return the stages that a rank runs, ascending."""
    return tuple(stage for stage, ranks in enumerate(request.stage_ranks) if rank in ranks)


def warmups(request: ScheduleSpec, depth: int = 1) -> tuple[int, ...]:
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


def reduction(request: ScheduleSpec, stage: int, minibatch: int) -> list[Instruction]:
    """Return the start of the reduction, where the stage is replicated."""
    return [Instruction("R", stage, minibatch)] if len(request.stage_ranks[stage]) > 1 else []


def step(stage: int, minibatch: int) -> Instruction:
    """Return the optimizer step."""
    return Instruction("S", stage, minibatch, weight_version=minibatch)


def flushed(
    name: str,
    request: ScheduleSpec,
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
            stages = stages_of(request, rank)
            row += [i for stage in stages for i in reduction(request, stage, t)]
            row += [step(stage, t) for stage in stages]  # the first of them needs the gradients of all, to clip
        rows.append(tuple(row))
    return Schedule(name, request, tuple(rows), (0,) * request.num_stages, tuple(in_flight))


def unflushed(
    name: str, request: ScheduleSpec, warmup: Sequence[int], staleness: Sequence[int], in_flight: Sequence[int]
) -> Schedule:
    """Return the schedule in which 1F1B runs on through the ends of minibatches, one stage on a rank.

    Minibatch t uses version ``max(t - staleness, 0)``. Where no stage is replicated, the step follows the rank's last
    backward of a minibatch. Else the reduction does, and the step may come later, so that the two overlap with other
    minibatches: before the forward that needs its version, and before the next reduction begins. As all stages may
    meet at a step, to agree on a clipping factor, what lies before it must need nothing that lies behind it elsewhere:

    - every stage one step stale (2bw): all stages wait, replicated or not. Before the step of t every stage has then
      run the forwards of all microbatches ``g < (t + 2) m``, and backwards of ``g < (t + 2) m - w_s r_s`` alone.
      Only the last stage, which sends nothing ahead, has its last backward of t + 1 still to come, where the next
      reduction begins; no earlier stage needs it yet.
    - else only a replicated stage waits, and a forward long: ``(w_s + 1) r_s <= w_v r_v`` for v < s.
    """
    rows: list[tuple[Instruction, ...]] = [()] * request.num_ranks
    replicated = any(len(ranks) > 1 for ranks in request.stage_ranks)
    long = replicated and set(staleness) == {1}
    ahead = None  # the fewest microbatches that an earlier stage sends ahead
    for stage, ranks in enumerate(request.stage_ranks):
        sent = warmup[stage] * len(ranks)
        short = len(ranks) > 1 and (ahead is None or sent + len(ranks) <= ahead)
        ahead = sent if ahead is None else min(ahead, sent)
        wait = "long" if long else "forward" if short else ""
        for rank in ranks:
            share = [(t, j) for t in minibatches(request) for j in own_microbatches(request, stage, rank, t)]
            rows[rank] = _unflushed_row(request, stage, share, warmup[stage], staleness[stage], wait)
    return Schedule(name, request, tuple(rows), tuple(staleness), tuple(in_flight))


def _unflushed_row(
    request: ScheduleSpec, stage: int, share: Sequence[tuple[int, int]], warmup: int, staleness: int, wait: str
) -> tuple[Instruction, ...]:
    """Return one rank's row. ``wait``: how long a step may, "" not at all; see ``unflushed``."""
    row: list[Instruction] = []
    ends = deque(minibatches(request))  # the minibatches whose end is still to come
    waiting: list[Instruction] = []  # a step that is due, but may wait
    done = 0
    counts = Counter(t for t, _ in share)
    drain = 2 * len(share) - min(warmup, len(share))  # the position behind the last forward and its backward
    last = dict(zip(ends, itertools.accumulate(counts[t] for t in ends), strict=True))  # backwards until t is through

    def end(minibatch: int) -> list[Instruction]:
        # what takes the gradients out, so that those of the next minibatch do not mix with them
        return [Instruction("R", stage, minibatch)] if wait == "long" else reduction(request, stage, minibatch)

    for position, (op, (t, j)) in enumerate(alternate(share, warmup)):
        # behind the warm-up every forward is followed by a backward: minibatches end before that forward
        while ends and last[ends[0]] <= done and position >= min(warmup, len(share)):
            minibatch = ends.popleft()
            row += [*waiting, *end(minibatch)]
            waiting = [step(stage, minibatch)]
        version = max(t - staleness, 0)
        if op == "F":
            due = version > waiting[0].weight_version if waiting else False
        else:  # where the next reduction begins, and where the forwards have come to their end
            due = wait != "long" or position >= drain or (bool(ends) and done + 1 == last[ends[0]])
        if waiting and (due or not wait):
            row += waiting
            waiting = []
        row.append(Instruction(op, stage, t, j, version))
        done += op == "B"
    row += waiting
    for t in ends:
        row += [*end(t), step(stage, t)]
    return tuple(row)

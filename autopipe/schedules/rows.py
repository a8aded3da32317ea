"""The building blocks of schedules: a rank's share of the microbatches, 1F1B order, the end of a minibatch, and rows as
text.

Warm-up. Each of the ``r_s`` replicas of stage ``s`` runs ``w_s`` forwards before forwards and backwards alternate:
``w_s = floor((depth * (N_s - r_s) + r_s - 1) / r_s)``, where ``N_s`` is the number of ranks of stage s and all later
stages. At depth 1 this is PipeDream's ``ceil(N_s / r_s) - 1``, and without replicas ``p - 1 - s``.

Proof that 1F1B cannot deadlock, for any replica counts. Number the microbatches of a run 0, 1, 2, ... B of g at stage u
waits, on its own rank, for F of at most ``g + w_u r_u``. That F, at a stage v <= u, waits for B of at most
``g + w_u r_u - (w_v + 1) r_v``, or, if replicas wait for one another in a reduction first, of at most
``g + w_u r_u - w_v r_v - 1``. The warm-ups satisfy ``w_u r_u <= w_v r_v`` for v <= u. So a B waits only for earlier
microbatches at the same stage or an earlier one, and there is no cycle.

Source: PipeDream, SOSP 2019, section 3.2 (NOAM), and 1F1B-RR.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from autopipe.ir.schedule import Instruction, Op, Schedule, ScheduleSpec

T = TypeVar("T")

_COLUMNS_AROUND = 8
_RANKS_AROUND = 8


def own_microbatches(request: ScheduleSpec, stage: int, rank: int, minibatch: int) -> range:
    """Return the microbatches of a minibatch that a rank runs at a stage, dealt round robin over its replicas."""
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
    """Return, for every stage, how many forwards each of its replicas runs before its first backward."""
    result, ranks_from_here = [], 0
    for ranks in reversed(request.stage_ranks):
        result.append((depth * ranks_from_here + len(ranks) - 1) // len(ranks))
        ranks_from_here += len(ranks)
    return tuple(reversed(result))


def alternate(forwards: Sequence[T], warmup: int, backwards: Sequence[T] | None = None) -> list[tuple[Op, T]]:
    """Return 1F1B order: ``warmup`` forwards, then one forward and one backward in turn, then the other backwards.

    ``backwards``: the order of the backwards, if it differs from that of the forwards.
    """
    backwards = forwards if backwards is None else backwards
    order = [(Op.FORWARD, item) for item in forwards[:warmup]]
    for item, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [(Op.FORWARD, item), (Op.BACKWARD, backward)]
    return order + [(Op.BACKWARD, item) for item in backwards[max(len(forwards) - warmup, 0) :]]


def reduction(request: ScheduleSpec, stage: int, minibatch: int) -> list[Instruction]:
    """Return the instruction that starts the reduction, or none if the stage is not replicated."""
    return [Instruction(Op.REDUCE, stage, minibatch)] if len(request.stage_ranks[stage]) > 1 else []


def step(stage: int, minibatch: int) -> Instruction:
    """Return the optimizer step."""
    return Instruction(Op.STEP, stage, minibatch, weight_version=minibatch)


def flushed(
    name: str,
    request: ScheduleSpec,
    order: Callable[[int, int], Sequence[tuple[Op, int, int]]],
    in_flight: Sequence[int],
) -> Schedule:
    """Return the synchronous schedule in which ranks compute in this order and step at the end of each minibatch.

    The reduction of a replicated stage begins behind the rank's last backward of that stage, so that it overlaps with
    the backwards of the rank's other stages.

    ``order(rank, minibatch)``: the (op, stage, microbatch) triples of a rank. ``in_flight``: see ``Schedule``.
    """
    rows = []
    for rank in range(request.num_ranks):
        row: list[Instruction] = []
        for t in minibatches(request):
            work, stages = order(rank, t), stages_of(request, rank)
            last = {stage: index for index, (_, stage, _) in enumerate(work)}
            for index, (op, stage, j) in enumerate(work):
                row.append(Instruction(op, stage, t, j, t))
                row += reduction(request, stage, t) if last[stage] == index else []
            # a replica without a microbatch of the minibatch takes part with zeros
            row += [i for stage in reversed(stages) if stage not in last for i in reduction(request, stage, t)]
            row += [step(stage, t) for stage in stages]  # clipping in the first step needs the gradients of all stages
        rows.append(tuple(row))
    return Schedule(name, request, tuple(rows), (0,) * request.num_stages, tuple(in_flight))


def unflushed(
    name: str, request: ScheduleSpec, warmup: Sequence[int], staleness: Sequence[int], in_flight: Sequence[int]
) -> Schedule:
    """Return the schedule in which 1F1B continues across the ends of minibatches, with one stage per rank.

    Minibatch t uses version ``max(t - staleness, 0)``. Without replicated stages, the step follows the rank's last
    backward of a minibatch. With replicas, the reduction follows it. The step may come later, so that the reduction
    overlaps with other minibatches; it must come before the forward that needs its version and before the next
    reduction begins. All stages may synchronize at a step, to agree on a clipping factor. So no instruction before a
    step may depend on an instruction after that step on another rank:

    - If every stage is one step stale (2bw), all stages delay their step, replicated or not. Before the step of t,
      every stage has run the forwards of all microbatches ``g < (t + 2) m``, but only the backwards of
      ``g < (t + 2) m - w_s r_s``. Only the last stage, which has no warm-up, has its last backward of t + 1 still to
      run, where the next reduction begins; no earlier stage needs that backward yet.
    - Otherwise only a replicated stage delays its step, by one forward, if ``(w_s + 1) r_s <= w_v r_v`` for all v < s.
    """
    rows: list[tuple[Instruction, ...]] = [()] * request.num_ranks
    replicated = any(len(ranks) > 1 for ranks in request.stage_ranks)
    until_reduction = replicated and set(staleness) == {1}
    ahead = None  # the fewest microbatches that an earlier stage sends ahead
    for stage, ranks in enumerate(request.stage_ranks):
        sent = warmup[stage] * len(ranks)
        until_forward = len(ranks) > 1 and (ahead is None or sent + len(ranks) <= ahead)
        ahead = sent if ahead is None else min(ahead, sent)
        wait = "reduction" if until_reduction else "forward" if until_forward else ""
        for rank in ranks:
            share = [(t, j) for t in minibatches(request) for j in own_microbatches(request, stage, rank, t)]
            rows[rank] = _unflushed_row(request, stage, share, warmup[stage], staleness[stage], wait)
    return Schedule(name, request, tuple(rows), tuple(staleness), tuple(in_flight))


def _unflushed_row(
    request: ScheduleSpec, stage: int, share: Sequence[tuple[int, int]], warmup: int, staleness: int, wait: str
) -> tuple[Instruction, ...]:
    """Return one rank's row. ``wait``: "reduction" or "forward", before which a step must run; "": do not delay it.

    See ``unflushed``.
    """
    row: list[Instruction] = []
    ends = deque(minibatches(request))  # the minibatches that have not ended yet
    waiting: list[Instruction] = []  # a delayed step
    done = 0
    counts = Counter(t for t, _ in share)
    drain = 2 * len(share) - min(warmup, len(share))  # the position after the last forward and its backward
    last = dict(zip(ends, itertools.accumulate(counts[t] for t in ends), strict=True))  # backwards up to the end of t

    def end(minibatch: int) -> list[Instruction]:
        # R takes the gradients out of the parameters, so that those of the next minibatch do not mix with them
        return (
            [Instruction(Op.REDUCE, stage, minibatch)] if wait == "reduction" else reduction(request, stage, minibatch)
        )

    for position, (op, (t, j)) in enumerate(alternate(share, warmup)):
        # after the warm-up, a backward follows every forward: minibatches end before that forward
        while ends and last[ends[0]] <= done and position >= min(warmup, len(share)):
            minibatch = ends.popleft()
            row += [*waiting, *end(minibatch)]
            waiting = [step(stage, minibatch)]
        version = max(t - staleness, 0)
        if op == Op.FORWARD:
            due = version > waiting[0].weight_version if waiting else False
        else:  # the next reduction begins here, or there are no more forwards
            due = wait != "reduction" or position >= drain or (bool(ends) and done + 1 == last[ends[0]])
        if waiting and (due or not wait):
            row += waiting
            waiting = []
        row.append(Instruction(op, stage, t, j, version))
        done += op == Op.BACKWARD
    row += waiting
    for t in ends:
        row += [*end(t), step(stage, t)]
    return tuple(row)


def table(rows: Sequence[Sequence[str]], first_rank: int = 0) -> str:
    """Return one line per rank, with the cells in columns of equal width and no trailing spaces."""
    width = max((len(cell) for row in rows for cell in row), default=1)
    digits = len(str(first_rank + len(rows) - 1))
    return "\n".join(
        f"rank {first_rank + index:>{digits}} | {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for index, row in enumerate(rows)
    )


def marked(schedule: Schedule, rank: int, index: int) -> str:
    """Return the part of the grid around instruction ``index`` of ``rank``, with that instruction in ``>...<``.

    Columns are positions in the row, not times. ``index`` may be the row's length, to mark its end.
    """
    low_rank, high_rank = max(rank - _RANKS_AROUND, 0), rank + _RANKS_AROUND + 1
    low, high = max(index - _COLUMNS_AROUND, 0), index + _COLUMNS_AROUND + 1
    rows = []
    for r, row in enumerate(schedule.rows[low_rank:high_rank], start=low_rank):
        cells = [str(i) for i in row[low:high]]
        if r == rank:
            cells.extend([""] * (index - low + 1 - len(cells)))
            cells[index - low] = f">{cells[index - low]}<"
        before, after = ["..."] if low else [], ["..."] if high < len(row) else []
        rows.append(before + cells + after)
    return table(rows, low_rank)

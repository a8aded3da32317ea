"""``Timeline`` -> columns of whole numbers for a Gantt chart, and the seconds of each rank by kind of work."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autopipe.ir.schedule import COMPUTE, COMPUTED_BY, COPIES, RECEIVES, SENDS, Instruction, Op
from autopipe.ir.timeline import Span, Timeline

OPS = tuple(Op)
KINDS = ("compute", "step", "transfer", "host", "idle")
"""What a rank does at any moment; see ``seconds_by_rank``."""
_RESOLUTION = 10**7  # whole numbers in the length of a timeline
_MOST_LATE = 0.02  # a message this part of the window before it was sent: the clocks differ

Rows = list[list[Span]]
Message = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a timeline."""

    timeline: Timeline
    first: int  # the first minibatch of the window
    last: int
    recorded: int = 0  # complete minibatches from which it was chosen; 0: all of them are shown


def rows_of(timeline: Timeline) -> Rows:
    """Return the spans of each rank in order of time."""
    rows: Rows = [[] for _ in range(timeline.num_ranks)]
    for span in timeline.spans:
        rows[span.rank].append(span)
    for row in rows:
        row.sort(key=lambda span: (span.start_seconds, span.end_seconds))
    return rows


def typical_window(timeline: Timeline, count: int) -> Window | None:
    """Return the part of a measured timeline to show: ``count`` minibatches in a row, of median length.

    Only minibatches that every rank has finished are considered, and not the first one, which warms up, if there are
    others. Returns None if no minibatch is complete.
    """
    ranks: dict[int, set[int]] = defaultdict(set)
    stepped: dict[int, set[tuple[int, int]]] = defaultdict(set)
    ends: dict[int, list[float]] = {}
    for span in timeline.spans:
        i = span.instruction
        ranks[i.minibatch].add(span.rank)
        if i.op == Op.STEP:
            stepped[i.minibatch].add((span.rank, i.stage))
        begin, end = ends.setdefault(i.minibatch, [math.inf, -math.inf])
        ends[i.minibatch] = [min(begin, span.start_seconds), max(end, span.end_seconds)]
    everyone, steps = set().union(*ranks.values()), set().union(*stepped.values()) if stepped else set()
    complete = sorted(t for t in ranks if ranks[t] == everyone and stepped.get(t, set()) == steps)
    if len(complete) > count:
        complete = complete[1:]
    begins = [t for t in complete if all(t + k in ranks and t + k in complete for k in range(count))]
    if not begins:
        begins, count = complete[-1:], 1
    if not begins:
        return None
    lengths = {t: ends[t + count - 1][1] - ends[t][0] for t in begins}
    middle = statistics.median_low(lengths.values())
    first = next(t for t in reversed(begins) if lengths[t] == middle)
    if count == 1:
        spans = tuple(s for s in timeline.spans if s.instruction.minibatch == first)
    else:  # steps overlap: others run at the same time
        begin, end = ends[first][0], ends[first + count - 1][1]
        spans = tuple(s for s in timeline.spans if begin <= s.start_seconds and s.end_seconds <= end)
    chosen = Timeline(timeline.source, timeline.num_ranks, spans, timeline.peak_bytes)
    return Window(chosen, first, first + count - 1, len(complete))


def columns(timeline: Timeline, rows: Rows, unit: float) -> dict[str, Any]:
    """Return the spans as columns, one set of columns per rank; times are whole numbers of ``unit`` seconds.

    Starts are differences to the previous start of the rank. A column with one value throughout is that number.
    """
    begin = min((span.start_seconds for span in timeline.spans), default=0.0)
    return {"seconds": timeline.seconds, "rows": [_row(row, begin, unit) for row in rows]}


def unit_of(timelines: Iterable[Timeline]) -> float:
    """Return a power of ten, in seconds, that is small enough for all of the timelines."""
    longest = max((timeline.seconds for timeline in timelines), default=0.0)
    return 10.0 ** (math.floor(math.log10(longest / _RESOLUTION)) + 1) if longest > 0 else 1.0


def _row(row: Sequence[Span], begin: float, unit: float) -> dict[str, Any]:
    starts = [round((span.start_seconds - begin) / unit) for span in row]
    ends = [round((span.end_seconds - begin) / unit) for span in row]
    instructions = [span.instruction for span in row]

    def column(value: Callable[[Instruction], int]) -> int | list[int]:
        values = [value(i) for i in instructions]
        return values[0] if values and len({*values}) == 1 else values

    return {
        "count": len(row),
        "start": [start - before for start, before in zip(starts, [0, *starts], strict=False)],
        "length": [end - start for start, end in zip(starts, ends, strict=True)],
        "op": column(lambda i: OPS.index(i.op)),
        "stage": column(lambda i: i.stage),
        "minibatch": column(lambda i: i.minibatch),
        "microbatch": column(lambda i: i.microbatch),
        "version": column(lambda i: i.weight_version),
        "peer": column(lambda i: i.peer),
    }


def seconds_by_rank(timeline: Timeline, rows: Rows) -> list[dict[str, float]]:
    """Return the seconds of each rank by kind; of every rank, they add up to the length of the timeline.

    ``compute``: forward and backward. ``step``: the optimizer. ``transfer``: sending, receiving what has been sent, and
    adding the gradients of replicas. ``host``: between two instructions, where the runtime works, or a spilled stage
    waits for copies from the host. ``idle``: before the first instruction, after the last one, and in a receive until
    the message is sent.
    """
    begin = min((span.start_seconds for span in timeline.spans), default=0.0)
    sent, computed = _sent(timeline.spans)
    sums = []
    for row in rows:
        own = dict.fromkeys(KINDS, 0.0)
        spans = [span for span in row if span.instruction.op not in COPIES]
        now = begin
        for index, span in enumerate(spans):
            own["host" if index else "idle"] += max(span.start_seconds - now, 0.0)
            start = max(span.start_seconds, now)  # a recorder may time one instruction within another
            length = max(span.end_seconds - start, 0.0)
            op = span.instruction.op
            if op in RECEIVES:
                waited = min(max(_available(span.instruction, sent, computed, start) - start, 0.0), length)
                own["idle"] += waited
                own["transfer"] += length - waited
            else:
                own["compute" if op in COMPUTE else "step" if op == Op.STEP else "transfer"] += length
            now = max(now, span.end_seconds)
        own["idle"] += max(begin + timeline.seconds - now, 0.0)
        sums.append(own)
    return sums


def clocks_agree(timeline: Timeline) -> bool:
    """Return whether no message arrived before it was sent, as it seems to if ranks on several hosts are timed."""
    sent, computed = _sent(timeline.spans)
    tolerance = _MOST_LATE * timeline.seconds
    return all(
        _available(span.instruction, sent, computed, -math.inf) <= span.end_seconds + tolerance
        for span in timeline.spans
        if span.instruction.op in RECEIVES
    )


def _sent(spans: Iterable[Span]) -> tuple[dict[tuple[Message, int], float], dict[Message, float]]:
    """Return when each send began, and when each message was computed: a send that takes no time has no span."""
    sent: dict[tuple[Message, int], float] = {}
    computed: dict[Message, float] = {}
    for span in spans:
        i = span.instruction
        if i.op in SENDS:
            sent[(COMPUTED_BY[i.op], i.stage, i.minibatch, i.microbatch), i.peer] = span.start_seconds
        elif i.op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUTS):
            kind = Op.FORWARD if i.op == Op.FORWARD else Op.BACKWARD
            computed[kind, i.stage, i.minibatch, i.microbatch] = span.end_seconds
    return sent, computed


def _available(
    i: Instruction, sent: dict[tuple[Message, int], float], computed: dict[Message, float], otherwise: float
) -> float:
    key = (COMPUTED_BY[i.op], i.peer, i.minibatch, i.microbatch)
    return sent.get((key, i.stage), computed.get(key, otherwise))

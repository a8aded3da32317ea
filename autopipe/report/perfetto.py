"""``Timeline`` -> Chrome trace JSON for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each rank is a process with three threads: compute, send and receive, and of a spilled run two more: the copies to the
device and those to the host. An arrow connects a send with the receive that
waited for it. If a send took no time (simulated timelines omit it), the arrow starts at the computation that produced
the message. A receive that did not wait has no arrow.

Source: the Trace Event Format, object form. torch's profiler (Kineto) writes the same format, so the two can be merged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from autopipe.ir.schedule import COMPUTED_BY, COPIES, RECEIVES, SENDS, Instruction, Op
from autopipe.ir.timeline import Span, Timeline

THREADS = ("compute", "send", "receive")
COPY_THREADS = ("host to device", "device to host")
_CATEGORIES = {
    Op.FORWARD: "fwd", Op.BACKWARD: "bwd", Op.BACKWARD_INPUTS: "bwd", Op.BACKWARD_WEIGHTS: "bwd",
    Op.SEND_FORWARD: "send", Op.SEND_BACKWARD: "send", Op.RECEIVE_FORWARD: "recv", Op.RECEIVE_BACKWARD: "recv",
    Op.REDUCE: "reduce", Op.STEP: "step", Op.LOAD: "copy", Op.LOAD_OPTIMIZER: "copy", Op.UNLOAD: "copy",
}  # fmt: skip

Event = dict[str, Any]
Key = tuple[str, int, int, int]


def chrome_trace(timeline: Timeline, rank_names: Sequence[str] = ()) -> str:
    """Return the JSON text. ``rank_names``: e.g. ``stage 1 (h0:cuda:1)``; by default the stages that the rank ran.

    Units: ``ts`` and ``dur`` are microseconds from the first start; a counter shows each rank's peak bytes.
    """
    begin = min((span.start_seconds for span in timeline.spans), default=0.0)
    events = [
        *_metadata(timeline, rank_names),
        *(_slice(span, begin) for span in timeline.spans),
        *_arrows(timeline, begin),
        *(
            {"ph": "C", "name": "peak bytes", "pid": rank, "tid": 0, "ts": 0, "args": {"bytes": count}}
            for rank, count in enumerate(timeline.peak_bytes)
        ),
    ]
    document = {"displayTimeUnit": "ms", "otherData": {"source": timeline.source}, "traceEvents": events}
    return json.dumps(document, separators=(",", ":")) + "\n"


def _metadata(timeline: Timeline, rank_names: Sequence[str]) -> Iterator[Event]:
    stages: list[set[int]] = [set() for _ in range(timeline.num_ranks)]
    spilled: set[int] = set()
    for span in timeline.spans:
        stages[span.rank].add(span.instruction.stage)
        if span.instruction.op in COPIES:
            spilled.add(span.rank)
    for rank, own in enumerate(stages):
        listed = ", ".join(str(stage) for stage in sorted(own))
        given = rank_names[rank] if rank < len(rank_names) else f"stage {listed} (rank {rank})"
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": given}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        names = (*THREADS, *COPY_THREADS) if rank in spilled else THREADS
        for thread, name in enumerate(names):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}


def _thread(instruction: Instruction) -> int:
    if instruction.op in COPIES:
        return 4 if instruction.op == Op.UNLOAD else 3
    return 1 if instruction.op in SENDS else 2 if instruction.op in RECEIVES else 0


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _slice(span: Span, begin: float) -> Event:
    i = span.instruction
    name = f"{i.op} mb{i.microbatch}" if i.microbatch >= 0 else i.op
    args: Event = {"instruction": str(i), "stage": i.stage, "minibatch": i.minibatch}
    if i.weight_version >= 0:
        args["weight_version"] = i.weight_version
    if i.peer >= 0:
        args["peer_stage"] = i.peer
    return {
        "ph": "X",
        "name": name,
        "cat": _CATEGORIES[i.op],
        "pid": span.rank,
        "tid": _thread(i),
        "ts": _microseconds(span.start_seconds - begin),
        "dur": _microseconds(span.end_seconds - span.start_seconds),
        "args": args,
    }


def _arrows(timeline: Timeline, begin: float) -> Iterator[Event]:
    sent: dict[tuple[Key, int], Span] = {}
    computed: dict[Key, Span] = {}
    for span in timeline.spans:
        i = span.instruction
        if i.op in SENDS:
            sent[(COMPUTED_BY[i.op], i.stage, i.minibatch, i.microbatch), i.peer] = span
        elif i.op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUTS):
            computed[Op.FORWARD if i.op == Op.FORWARD else Op.BACKWARD, i.stage, i.minibatch, i.microbatch] = span
    number = 0
    for span in timeline.spans:
        i = span.instruction
        if i.op not in RECEIVES:
            continue
        key = (COMPUTED_BY[i.op], i.peer, i.minibatch, i.microbatch)
        source = sent.get((key, i.stage)) or computed.get(key)
        if source is None:
            continue
        number += 1
        name = {"name": "message", "cat": "message", "id": number}
        yield {"ph": "s", **name, **_end(source, begin)}
        yield {"ph": "f", "bp": "e", **name, **_end(span, begin)}


def _end(span: Span, begin: float) -> Event:
    """Return a point just inside the end of a slice: arrows attach to the slice that contains their end."""
    inside = span.end_seconds - (span.end_seconds - span.start_seconds) / 100
    return {"pid": span.rank, "tid": _thread(span.instruction), "ts": _microseconds(inside - begin)}

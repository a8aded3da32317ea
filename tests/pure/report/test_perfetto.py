"""The Chrome trace of a timeline has the records that Perfetto needs, with the numbers of the timeline."""

import json

from autopipe.ir.schedule import StageEdges
from autopipe.ir.timeline import Span, Timeline
from autopipe.report.perfetto import chrome_trace
from autopipe.schedules import Costs, EdgeCosts, StageCosts, lower, make, simulate
from autopipe.schedules.kind import line


def measured() -> Timeline:
    """Return a timeline of one microbatch on two ranks, with times that start at 100 s."""
    rows = lower(make("gpipe", line(2, 1)), StageEdges.chain(2)).rows
    spans = []
    for rank, (row, start) in enumerate(zip(rows, (100.0, 100.5), strict=True)):
        spans += [Span(rank, i, start + index, start + index + 0.5) for index, i in enumerate(row)]
    return Timeline("measured", 2, tuple(spans), peak_bytes=(10, 20))


def events(timeline: Timeline, **options) -> list[dict]:
    document = json.loads(chrome_trace(timeline, **options))
    assert document["displayTimeUnit"] == "ms"
    return document["traceEvents"]


def test_every_span_is_a_slice_in_microseconds_on_its_ranks_track():
    timeline = measured()
    slices = [e for e in events(timeline) if e["ph"] == "X"]
    assert len(slices) == len(timeline.spans)
    assert slices[0] == {
        "ph": "X", "name": "F mb0", "cat": "fwd", "pid": 0, "tid": 0, "ts": 0.0, "dur": 500000.0,
        "args": {"instruction": "0F0@0", "stage": 0, "minibatch": 0, "weight_version": 0},
    }  # fmt: skip
    assert [(e["cat"], e["tid"]) for e in slices if e["pid"] == 1] == [
        ("recv", 2), ("fwd", 0), ("bwd", 0), ("send", 1), ("step", 0),
    ]  # fmt: skip
    assert slices[1]["args"]["peer_stage"] == 1


def test_processes_are_named_and_sorted_by_rank_and_memory_is_a_counter():
    entries = events(measured(), rank_names=["stage 0 (h0:cuda:0)"])
    names = [e["args"]["name"] for e in entries if e["name"] == "process_name"]
    assert names == ["stage 0 (h0:cuda:0)", "stage 1 (rank 1)"]
    assert [e["args"]["sort_index"] for e in entries if e["name"] == "process_sort_index"] == [0, 1]
    assert [e["args"]["name"] for e in entries if e["name"] == "thread_name"] == ["compute", "send", "receive"] * 2
    assert [(e["pid"], e["args"]) for e in entries if e["ph"] == "C"] == [(0, {"bytes": 10}), (1, {"bytes": 20})]


def arrows(entries: list[dict]) -> list[tuple[dict, dict]]:
    starts = {e["id"]: e for e in entries if e["ph"] == "s"}
    ends = {e["id"]: e for e in entries if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert all(e["bp"] == "e" for e in ends.values())
    return [(starts[number], ends[number]) for number in sorted(starts)]


def inside(end: dict, entries: list[dict]) -> str:
    """Return the slice that contains the end of an arrow."""
    (name,) = [
        e["args"]["instruction"]
        for e in entries
        if e["ph"] == "X" and (e["pid"], e["tid"]) == (end["pid"], end["tid"])
        and e["ts"] <= end["ts"] < e["ts"] + e["dur"]
    ]  # fmt: skip
    return name


def test_an_arrow_goes_from_each_send_to_its_receive():
    entries = events(measured())
    assert [(inside(a, entries), inside(b, entries)) for a, b in arrows(entries)] == [
        ("1SB0>0", "0RB0<1"),
        ("0SF0>1", "1RF0<0"),
    ]


def test_without_send_times_arrows_start_at_the_computation_of_the_message():
    costs = Costs((StageCosts(1, 1),) * 2, {(0, 1): EdgeCosts(0.25), (1, 0): EdgeCosts(0.25)})
    entries = events(simulate(make("gpipe", line(2, 1)), costs))
    assert [(inside(a, entries), inside(b, entries)) for a, b in arrows(entries)] == [
        ("1B0@0", "0RB0<1"),
        ("0F0@0", "1RF0<0"),
    ]


def test_a_timeline_without_spans_is_still_a_trace():
    assert [e["ph"] for e in events(Timeline("simulated", 1, ()))] == ["M"] * 5

"""A report page has the numbers of its plan, timelines and metrics, and nothing in it is markup of a user."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.reports.pages import metrics, slower, subject

import autopipe.report.page
from autopipe.ir.schedule import COMPUTE, Op
from autopipe.ir.timeline import Span, Timeline
from autopipe.report.page import curves, page_of, render
from autopipe.report.page.html import ECHARTS, SCRIPTS
from autopipe.report.page.timelines import KINDS, OPS, clocks_agree, rows_of, seconds_by_rank, typical_window
from autopipe.units import in_bytes, in_seconds

ROOT = Path(__file__).resolve().parents[3]
ASSETS = Path(autopipe.report.page.__file__).parent / "assets"


class Parts(HTMLParser):
    """The elements of a page, its script and style texts, and the text of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.cells: list[str] = []
        self.shown: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "script":
            self.scripts.append("")
        elif tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
            return
        if "td" in self._open:
            self.cells[-1] += data
        if self._open and self._open[-1] != "style":
            self.shown.append(data)

    @property
    def data(self):
        return json.loads(self.scripts[0])


def decoded(panel, unit):
    """Return (rank, op, stage, minibatch, microbatch, version, peer, start, end) of every bar."""
    bars = []
    for rank, row in enumerate(panel["rows"]):
        names = ("op", "stage", "minibatch", "microbatch", "version", "peer")
        columns = [row[n] if isinstance(row[n], list) else [row[n]] * row["count"] for n in names]
        for start, length, *fields in zip(itertools.accumulate(row["start"]), row["length"], *columns, strict=True):
            bars.append((rank, *fields, start * unit, (start + length) * unit))
    return bars


@pytest.mark.parametrize(
    ("schedule", "options"), [("1f1b", {}), ("gpipe", {}), ("interleaved", {"stages_per_rank": 2})]
)
def test_every_span_of_a_timeline_is_a_bar_with_its_numbers(schedule, options):
    shown = subject(4, 8, schedule=schedule, layers=24, **options)
    data = page_of(shown).data["gantt"]
    for name, timeline in (("predicted", shown.predicted), ("measured", shown.measured.timeline)):
        begin = min(span.start_seconds for span in timeline.spans)
        spans = [span for row in rows_of(timeline) for span in row]
        bars = decoded(data[name], data["unit"])
        assert len(bars) == len(spans) > 0
        for bar, span in zip(bars, spans, strict=True):
            i = span.instruction
            fields = (OPS.index(i.op), i.stage, i.minibatch, i.microbatch, i.weight_version, i.peer)
            assert bar[:7] == (span.rank, *fields)
            assert bar[7:] == pytest.approx((span.start_seconds - begin, span.end_seconds - begin), abs=data["unit"])
        assert data["unit"] < 1e-6 * timeline.seconds
        assert data[name]["seconds"] == timeline.seconds


def test_the_columns_are_small():
    shown = subject(16, 50)
    text = json.dumps(page_of(shown).data["gantt"]["predicted"], separators=(",", ":"))
    assert len(text) < 30 * len(shown.predicted.spans)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_seconds_of_a_rank_add_up_to_the_timeline(schedule):
    shown = subject(4, 8, schedule=schedule)
    for timeline in (shown.predicted, shown.measured.timeline):
        for rank, sums in enumerate(seconds_by_rank(timeline, rows_of(timeline))):
            assert tuple(sums) == KINDS
            assert sum(sums.values()) == pytest.approx(timeline.seconds)
            assert sums["compute"] == pytest.approx(timeline.busy_seconds(rank))
            assert min(sums.values()) >= 0
    assert all(sums["host"] == pytest.approx(0) for sums in seconds_by_rank(shown.predicted, rows_of(shown.predicted)))


def test_a_receive_is_idle_until_its_message_is_sent_and_then_a_transfer():
    timeline = subject(2, 1).predicted
    i = {(span.rank, span.instruction.op): span.instruction for span in timeline.spans}
    spans = (
        Span(0, i[0, Op.FORWARD], 0.0, 2.0),
        Span(0, i[0, Op.FORWARD].__class__(Op.SEND_FORWARD, 0, 0, 0, peer=1), 2.5, 3.0),
        Span(1, i[0, Op.FORWARD].__class__(Op.RECEIVE_FORWARD, 1, 0, 0, peer=0), 0.0, 4.0),
        Span(1, i[1, Op.FORWARD], 4.5, 6.0),
    )
    timeline = Timeline("measured", 2, spans)
    first, second = seconds_by_rank(timeline, rows_of(timeline))
    assert first == pytest.approx({"compute": 2.0, "step": 0.0, "transfer": 0.5, "host": 0.5, "idle": 3.0})
    assert second == pytest.approx({"compute": 1.5, "step": 0.0, "transfer": 1.5, "host": 0.5, "idle": 2.5})
    assert clocks_agree(timeline)
    early = dataclasses.replace(spans[2], start_seconds=-3.0, end_seconds=-1.0)
    assert not clocks_agree(Timeline("measured", 2, (*spans[:2], early, spans[3])))


def test_the_window_is_the_complete_minibatch_of_median_length():
    one = subject(2, 4).predicted
    spans = []
    for t, (factor, left_out) in enumerate([(9.0, ()), (1.0, ()), (3.0, ()), (2.0, ()), (0.5, (Op.STEP,))]):
        for span in one.spans:
            i = dataclasses.replace(span.instruction, minibatch=t)
            if i.op not in left_out:
                spans.append(
                    Span(span.rank, i, 10 * t + factor * span.start_seconds, 10 * t + factor * span.end_seconds)
                )
    window = typical_window(Timeline("measured", 2, tuple(spans)), 1)
    assert (window.first, window.last, window.recorded) == (3, 3, 3)
    assert window.timeline.seconds == pytest.approx(2 * one.seconds)
    assert {s.instruction.minibatch for s in window.timeline.spans} == {3}
    cut = tuple(s for s in spans if s.instruction.minibatch == 4)
    assert typical_window(Timeline("measured", 2, cut), 1).recorded == 1  # no rank has stepped: all are alike
    half = tuple(s for s in spans if s.instruction.minibatch != 4 or s.rank == 0)
    assert typical_window(Timeline("measured", 2, half), 1).first == 3


def test_tables_have_the_numbers_of_the_plan():
    shown = subject(3, 6)
    parts = Parts(render(page_of(shown)))
    for stage in shown.plan.stages:
        for text in (stage.name, in_seconds(stage.forward_seconds), in_bytes(stage.peak_bytes)):
            assert text in parts.cells
    for boundary in shown.plan.boundaries:
        assert boundary.value in parts.cells
        assert in_bytes(boundary.bytes) in parts.cells
    data = parts.data
    assert data["memory"]["planned"] == [stage.peak_bytes for stage in shown.plan.stages]
    assert data["memory"]["measured"] == [stage.peak_bytes * 19 // 20 for stage in shown.plan.stages]
    assert data["memory"]["limit"] == 8 * 2**30
    assert [b[3] for b in data["boundaries"]] == [b.bytes for b in shown.plan.boundaries]
    times = seconds_by_rank(shown.measured.timeline, rows_of(shown.measured.timeline))
    assert data["times"]["measured"]["idle"] == pytest.approx([sums["idle"] for sums in times], rel=1e-5)


def test_modules_cover_every_call_of_their_stage():
    shown = subject(4, 8)
    model = page_of(shown).data["model"]
    calls = len(shown.graph.nodes)
    for depth in range(3):
        at = [k for k, level in enumerate(model["depth"]) if level == depth]
        covered = [position for k in at for position in range(model["start"][k], model["stop"][k])]
        assert covered == list(range(calls))
        for k in at:
            stage = shown.plan.stages[model["stage"][k]]
            assert stage.start <= model["start"][k] < model["stop"][k] <= stage.stop
    assert model["weights"] == [3_000_000] * calls
    assert model["byTime"]
    alone = page_of(dataclasses.replace(shown, profile=None)).data["model"]
    assert (alone["weights"], alone["byTime"]) == ([1] * calls, False)


def test_what_was_not_measured_is_named():
    parts = Parts(render(page_of(subject(2, 4, measured=False))))
    text = " ".join(parts.shown)
    assert text.count("which has not been trained") == 4
    assert "Schedule: not measured." in text
    assert {"predicted", "not measured"} <= set(parts.cells)
    assert "measured 0" not in text
    data = parts.data
    assert (data["gantt"]["measured"], data["times"]["measured"], data["memory"]["measured"]) == (None, None, None)
    assert data["history"] is None


def test_curves_have_every_attempt_and_the_seconds_of_each_step():
    rows = metrics(30, rate=50.0, samples=32)
    history = curves.history_of(rows)
    assert [attempt.reason for attempt in history.attempts] == [
        "", "restart 1 from step 9, 2 ranks", "resumed from step 21",
    ]  # fmt: skip
    assert [step for attempt in history.attempts for step in attempt.steps] == list(range(1, 31))
    first = history.attempts[0]
    assert first.losses == [5.0 / (1 + step) for step in range(11)]
    assert first.rates == pytest.approx([50.0 / (1 + 0.1 * (step % 3)) for step in range(11)])
    assert history.attempts[1].rates[0] is None  # the pause before a restart is not the time of a step
    assert history.attempts[2].rates[0] == pytest.approx(50.0)
    assert history.evaluations == [(8, 5.2 / 8), (16, 5.2 / 16)]
    columns = curves.columns(history)
    assert columns["perPoint"] == 1
    assert columns["evaluations"] == [[8, 16], [5.2 / 8, 5.2 / 16]]


def test_long_runs_are_averaged_and_say_so(monkeypatch):
    monkeypatch.setattr(curves, "MOST_POINTS", 10)
    history = curves.history_of({"step": k, "loss": float(k), "samples": 1, "seconds": k + 1.0} for k in range(35))
    columns = curves.columns(history)
    assert columns["perPoint"] == 4
    assert columns["attempts"][0]["losses"] == [1.5, 5.5, 9.5, 13.5, 17.5, 21.5, 25.5, 29.5, 33.0]
    assert columns["attempts"][0]["steps"] == [4, 8, 12, 16, 20, 24, 28, 32, 35]


def test_rows_that_are_damaged_are_counted_and_others_kept():
    good = {"step": 0, "loss": None, "samples": 8, "seconds": 1.0}
    bad = [
        {"step": 1},
        {"step": "x", "loss": 1, "samples": 1, "seconds": 2},
        {"peak": 3},
        {"audit": None},
        {},
        {"step": 4, "loss": 1.0, "samples": 1, "seconds": math.inf},
    ]
    history = curves.history_of([good, *bad, {"step": 2, "loss": 0.5, "samples": 8, "seconds": 2.0}])
    assert history.unreadable == len(bad)
    assert history.losses == {1: None, 3: 0.5}
    page = page_of(dataclasses.replace(subject(2, 2), history=history))
    assert "6 rows of metrics.jsonl could not be read, and are not shown." in page.remarks
    assert page.data["history"]["attempts"][0]["losses"] == [None, 0.5]


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&<!--"


def test_names_of_users_are_never_markup():
    shown = subject(2, 4, name=EVIL)
    graph = shown.graph
    nodes = tuple(
        dataclasses.replace(node, module_path=EVIL.replace(".", ""), module_type=EVIL, name=f"{node.name}")
        for node in graph.nodes
    )
    stages = tuple(dataclasses.replace(stage, modules=EVIL) for stage in shown.plan.stages)
    shown = dataclasses.replace(
        shown,
        graph=dataclasses.replace(graph, nodes=nodes),
        plan=dataclasses.replace(shown.plan, stages=stages),
        facts=((EVIL, EVIL),),
        predicted_note=EVIL,
        missing={"memory": EVIL, "explanation": EVIL},
    )
    plain, text = render(page_of(subject(2, 4))), render(page_of(shown))
    parts = Parts(text)
    assert sum(tag == "script" for tag, _ in parts.tags) == sum(tag == "script" for tag, _ in Parts(plain).tags)
    assert [tag for tag, _ in parts.tags if tag in ("img", "iframe", "object", "embed")] == []
    assert not any(name.startswith("on") for _, attributes in parts.tags for name in attributes)
    assert parts.data["stages"][0]["name"] == EVIL
    assert EVIL in parts.cells
    assert "alert(1)" not in "".join(parts.scripts[1:])


def test_a_page_refers_to_nothing_outside_of_it():
    parts = Parts(render(page_of(subject(2, 4))))
    links = [a[key] for _, a in parts.tags for key in ("src", "href") if key in a]
    assert all(link.startswith(("#", "data:")) for link in links)
    policies = [a["content"] for tag, a in parts.tags if tag == "meta" and a.get("http-equiv")]
    assert len(policies) == 1
    assert policies[0].startswith("default-src 'none';")
    assert any(tag == "noscript" for tag, _ in parts.tags)


def test_no_script_of_the_page_ends_its_element():
    for name in (ECHARTS, *SCRIPTS):
        assert "</script" not in (ASSETS / name).read_text(encoding="utf-8").lower()
    assert "</style" not in (ASSETS / "page.css").read_text(encoding="utf-8").lower()


def test_the_library_is_the_one_that_the_documentation_names():
    table = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    (digest,) = re.findall(r"echarts\.min\.js` \|.*?`([0-9a-f]{64})`", table)
    assert hashlib.sha256((ASSETS / ECHARTS).read_bytes()).hexdigest() == digest
    assert {path.name for path in (ASSETS / "vendor").iterdir()} >= {"LICENSE", "LICENSE-d3", "NOTICE"}


def test_our_scripts_and_style_are_short_files():
    own = [path for path in ASSETS.iterdir() if path.is_file()]
    assert {path.name for path in own} == {"page.html", "page.css", *SCRIPTS}
    assert max(len(path.read_text(encoding="utf-8").splitlines()) for path in own) <= 400


def test_a_measurement_that_is_slower_has_a_longer_panel():
    timeline = subject(2, 4).predicted
    assert slower(timeline).seconds > timeline.seconds
    assert {span.instruction.op for span in timeline.spans} >= {COMPUTE[0], Op.STEP}

"""Write docs/pictures/*.svg and the table of docs/schedules.md from the schedules and the simulator.

Every bar is a span of a simulated timeline, so a picture shows what ranks execute. A forward takes one unit of time and
a backward two, if the picture does not say otherwise; messages take no time. With ``--check`` nothing is written, and
files that differ are an error.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from generated import write_or_compare

from autopipe.ir.schedule import COMPUTE, COPIES, SENDS, Instruction, Op, Schedule, ScheduleSpec, StageEdges
from autopipe.ir.timeline import Span, Timeline
from autopipe.schedules import Costs, StageBytes, StageCosts, lower, make, peak_bytes, simulate
from autopipe.schedules.costs import SpillCosts
from autopipe.schedules.kind import line

DOCS = Path(__file__).resolve().parent
PICTURES, PAGE = DOCS / "pictures", DOCS / "schedules.md"
BEGIN, END = "<!-- table: make docs -->", "<!-- end of table -->"

UNIT, ROW, GAP, LEFT, WIDTH = 26.0, 30.0, 4.0, 118.0, 1040.0
# legible on white and on black
INK = "#768390"
# operation -> fill and text of the first and the second group (minibatches, or the stages of a rank)
COLORS = {
    Op.FORWARD: (("#2f6fb7", "#fff"), ("#8fc0f0", "#123")),
    Op.BACKWARD: (("#2e7d4f", "#fff"), ("#8fd3a8", "#123")),
    Op.BACKWARD_INPUTS: (("#2e7d4f", "#fff"), ("#8fd3a8", "#123")),
    Op.BACKWARD_WEIGHTS: (("#7a4fb5", "#fff"), ("#c3a6ea", "#123")),
    Op.STEP: (("#b3541e", "#fff"), ("#b3541e", "#fff")),
    Op.REDUCE: (("#d9a514", "#123"), ("#d9a514", "#123")),
    Op.LOAD: (("#0f7c8a", "#fff"), ("#0f7c8a", "#fff")),
    Op.LOAD_OPTIMIZER: (("#d9a514", "#123"), ("#d9a514", "#123")),
    Op.UNLOAD: (("#9a4a6f", "#fff"), ("#9a4a6f", "#fff")),
}
WORDS = {
    Op.FORWARD: "forward of a microbatch",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUTS: "backward, for the inputs",
    Op.BACKWARD_WEIGHTS: "backward, for the weights",
    Op.STEP: "optimizer step",
    Op.REDUCE: "sum over replicas",
    Op.LOAD: "weights to the device",
    Op.LOAD_OPTIMIZER: "optimizer state to the device",
    Op.UNLOAD: "back to the host",
}
LANES = "compute", "to the device", "to the host"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One timeline of a picture."""

    title: str
    timeline: Timeline
    group: Callable[[Instruction], int] = lambda i: 0  # which of the two colors of an operation
    second: Callable[[Instruction], str] = lambda i: ""  # a second line in the bar of a forward or a backward
    name: Callable[[int], str] = lambda rank: f"rank {rank}"
    members: int = 1  # rows for each rank
    shows_idle: bool = True
    gap: str = ""  # the word in the longest idle time


@dataclass
class Drawing:
    """The SVG elements of a picture, and where the next one begins."""

    elements: list[str] = field(default_factory=list)
    y: float = 0.0
    width: float = 0.0

    def text(self, x: float, y: float, words: str, size: int = 13, fill: str = INK, anchor: str = "start") -> None:
        """Add a line of text; ``y`` is its baseline."""
        self.elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">'
            f"{escape(words)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str, more: str = "") -> None:
        """Add a rectangle."""
        self.elements.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{more}/>'
        )
        self.width = max(self.width, x + width)


def svg(title: str, panels: Sequence[Panel]) -> str:
    """Return a picture: its panels one below the other on one scale, and a legend."""
    drawing = Drawing()
    longest = max(panel.timeline.seconds for panel in panels)
    unit = min(UNIT, (WIDTH - LEFT) / longest)
    for panel in panels:
        _draw(drawing, panel, unit)
    _legend(drawing, {span.instruction.op for panel in panels for span in panel.timeline.spans})
    width, height = max(drawing.width, 560.0) + 8, drawing.y + 8
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}" font-family="system-ui, sans-serif">',
            f"<title>{escape(title)}</title>",
            *drawing.elements,
            "</svg>",
            "",
        ]
    )


def _draw(drawing: Drawing, panel: Panel, unit: float) -> None:
    timeline, seconds = panel.timeline, panel.timeline.seconds
    idle = f": {timeline.bubble_fraction:.0%} idle" if panel.shows_idle else ""
    drawing.text(4, drawing.y + 18, panel.title + idle, size=14)
    top = drawing.y + 28
    lanes = 3 if any(span.instruction.op in COPIES for span in timeline.spans) else 1
    rows = [(rank, part) for rank in range(timeline.num_ranks) for part in range(lanes * panel.members)]
    place = {row: top + index * (ROW + GAP) for index, row in enumerate(rows)}
    for (rank, part), y in place.items():
        name = LANES[part] if lanes > 1 else panel.name(rank)
        member = f", member {part}" if panel.members > 1 else ""
        drawing.text(4, y + ROW / 2 + 4, name + member, size=12)
        drawing.box(LEFT, y, seconds * unit, ROW, "#808080", ' fill-opacity="0.16"')
    for span in timeline.spans:
        for member in range(panel.members):
            _bar(drawing, panel, span, place[span.rank, member + _lane(span.instruction)], unit)
    if panel.gap:
        start, end, rank = max(_gaps(timeline), key=lambda gap: (round(gap[1] - gap[0], 6), -gap[2]))
        y = place[rank, 0] + ROW / 2 + 4
        drawing.text(LEFT + (start + end) / 2 * unit, y, panel.gap, size=12, anchor="middle")
    drawing.y = top + len(rows) * (ROW + GAP) + 10


def _bar(drawing: Drawing, panel: Panel, span: Span, y: float, unit: float) -> None:
    i = span.instruction
    fill, ink = COLORS[i.op][panel.group(i) % 2]
    x, width = LEFT + span.start_seconds * unit, (span.end_seconds - span.start_seconds) * unit
    drawing.box(x + 0.5, y, max(width - 1, 1), ROW, fill, ' rx="2"')
    first = "" if i.microbatch < 0 else str(i.microbatch)
    second = panel.second(i) if i.op in (*COMPUTE, *COPIES) else ""
    lines = [words for words in (first, second) if words and width >= 6 * len(words) + 2]
    for index, words in enumerate(lines):
        middle = y + ROW / 2 + 4.5 + (index * 11 - 6 if len(lines) > 1 else 0)
        drawing.text(x + width / 2, middle, words, size=10 if len(lines) > 1 else 12, fill=ink, anchor="middle")


def _lane(i: Instruction) -> int:
    if i.op not in COPIES:
        return 0
    return 2 if i.op == Op.UNLOAD else 1


def _gaps(timeline: Timeline) -> list[tuple[float, float, int]]:
    """Return every time in which a rank waits between two spans: start, end and rank."""
    gaps = []
    for rank in range(timeline.num_ranks):
        spans = sorted((s for s in timeline.spans if s.rank == rank), key=lambda span: span.start_seconds)
        gaps += [(a.end_seconds, b.start_seconds, rank) for a, b in itertools.pairwise(spans)]
    return gaps


def _legend(drawing: Drawing, ops: set[Op]) -> None:
    x, y = 4.0, drawing.y + 2
    for op, words in WORDS.items():
        if op not in ops:
            continue
        if x + 24 + 7 * len(words) > WIDTH:
            x, y = 4.0, y + 20
        drawing.box(x, y, 12, 12, COLORS[op][0][0], ' rx="2"')
        drawing.text(x + 17, y + 10.5, words, size=12)
        x += 40 + 6.4 * len(words)
        drawing.width = max(drawing.width, x)
    drawing.y = y + 18


def costs(stages: int, forward: float = 1.0, backward: float = 2.0, step: float = 0.0, **more: float) -> Costs:
    """Return equal stages. The halves of a split backward take half of its time each."""
    return Costs((StageCosts(forward, backward, backward / 2, backward / 2, step, **more),) * stages)  # type: ignore[arg-type]


def looped(ranks: int, per_rank: int, microbatches: int) -> ScheduleSpec:
    """Return a layout with several stages on each rank: stage s on rank s mod p."""
    return ScheduleSpec(tuple((s % ranks,) for s in range(ranks * per_rank)), microbatches)


def run(name: str, spec: ScheduleSpec, figures: Costs | None = None) -> Timeline:
    """Return the simulated timeline of a schedule, without the spans of ranks that wait for messages."""
    timeline = simulate(make(name, spec), figures or costs(spec.num_stages))
    return dataclasses.replace(timeline, spans=tuple(span for span in timeline.spans if span.instruction.op in COLORS))


def pictures() -> dict[str, str]:
    """Return the text of every picture by its file name."""
    replicated = ScheduleSpec(((0, 1, 2), (3,)), 12)
    uneven = Costs((StageCosts(3.0, 6.0, reduce_seconds=1.5, step_seconds=1.0), StageCosts(1.0, 2.0, step_seconds=1.0)))
    copies = SpillCosts(weights=2.0, optimizer=2.0)
    spilling = Costs((StageCosts(1.0, 3.0, step_seconds=1.0),) * 3, spill=(copies,) * 3)

    def stage(i: Instruction) -> str:
        return f"s{i.stage}"

    return {
        "microbatches.svg": svg(
            "A minibatch in one part, in four and in eight, on four stages",
            [
                Panel(
                    title=f"{count} microbatch{'es' if count > 1 else ''}",
                    timeline=run("gpipe", line(4, count), costs(4, 8 / count, 16 / count)),
                    gap="bubble" if count == 4 else "",
                )
                for count in (1, 4, 8)
            ],
        ),
        "1f1b.svg": svg(
            "GPipe and 1F1B",
            [
                Panel(title="gpipe", timeline=run("gpipe", line(4, 8)), gap="bubble"),
                Panel(title="1f1b", timeline=run("1f1b", line(4, 8)), gap="bubble"),
            ],
        ),
        "interleaved.svg": svg(
            "1F1B with one and with two stages on each rank",
            [
                Panel(title="1f1b, 4 stages", timeline=run("1f1b", line(4, 8))),
                Panel(
                    title="interleaved, 8 stages of half the size; light: the second stage of a rank",
                    timeline=run("interleaved", looped(4, 2, 8), costs(8, 0.5, 1.0)),
                    group=lambda i: i.stage // 4,
                ),
            ],
        ),
        "zero-bubble.svg": svg(
            "1F1B, and a backward in two halves",
            [
                Panel(title="1f1b", timeline=run("1f1b", line(4, 8))),
                Panel(title="zero-bubble", timeline=run("zero-bubble", line(4, 8))),
            ],
        ),
        "replicas.svg": svg(
            "A slow stage on three ranks",
            [
                Panel(
                    title="stage 0 takes three times as long, and has three replicas",
                    timeline=run("1f1b", replicated, uneven),
                    name=lambda rank: "stage 1" if rank == 3 else f"stage 0, replica {rank}",
                )
            ],
        ),
        "recompute.svg": svg(
            "Without and with recompute",
            [
                Panel(title="recompute never", timeline=run("1f1b", line(4, 6)), shows_idle=False),
                Panel(
                    title="recompute stage: every backward first runs its forward again",
                    timeline=run("1f1b", line(4, 6), costs(4, 1.0, 3.0)),
                    shows_idle=False,
                ),
            ],
        ),
        "versions.svg": svg(
            "Weight versions of 1F1B, PipeDream-2BW and PipeDream",
            [
                Panel(
                    title=f"{name}, three minibatches of 4, the second one light; v1: weights after one step",
                    timeline=run(name, line(3, 4, 3), costs(3, step=0.5)),
                    group=lambda i: i.minibatch,
                    second=lambda i: f"v{i.weight_version}" if i.weight_version >= 0 else "",
                    shows_idle=False,
                )
                for name in ("1f1b", "2bw", "pipedream")
            ],
        ),
        "spilled.svg": svg(
            "Three stages that take turns on one device",
            [
                Panel(
                    title="spilled, 6 microbatches",
                    timeline=run("spilled", ScheduleSpec(((0,),) * 3, 6), spilling),
                    second=stage,
                    group=lambda i: i.stage,
                    shows_idle=False,
                )
            ],
        ),
        "teams.svg": svg(
            "Four ranks, and two teams of two members",
            [
                Panel(title="4 stages on 4 devices", timeline=run("1f1b", line(4, 8))),
                Panel(
                    title="2 stages, each with a team of 2, whose sums take a tenth of the time",
                    timeline=run("1f1b", line(2, 8), costs(2, 1.1, 2.2)),
                    members=2,
                ),
            ],
        ),
    }


@dataclass(frozen=True)
class Row:
    """A schedule of the table."""

    label: str
    name: str
    per_rank: int = 1
    options: tuple[tuple[str, int], ...] = ()


ROWS = (
    Row("`gpipe`", "gpipe"),
    Row("`1f1b`", "1f1b"),
    Row("`eager-1f1b`", "eager-1f1b"),
    Row("`interleaved`, 2 stages a rank", "interleaved", 2),
    Row("`zero-bubble`", "zero-bubble"),
    Row("`2bw`", "2bw"),
    Row("`pipedream`", "pipedream"),
    Row("`pipedream --vertical-sync`", "pipedream", 1, (("vertical_sync", 1),)),
)
RANKS, WINDOW = 4, 6


def table(ranks: int = RANKS, counts: tuple[int, ...] = (8, 32)) -> str:
    """Return the comparison of the schedules, as lines of Markdown."""
    idle_of = " | ".join(f"idle, {count} microbatches" for count in counts)
    head = f"| schedule | {idle_of} | activations at most | weight versions | stale by | messages |"
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for row in ROWS:
        idle = [f"{_idle(row, ranks, count):.1%}" for count in counts]
        schedule = _schedule(row, ranks, counts[0], WINDOW)
        kept = _per_rank(schedule, row, StageBytes(fixed=0, version=0, in_flight=100 // row.per_rank))
        versions = _per_rank(schedule, row, StageBytes(fixed=0, version=100 // row.per_rank, in_flight=0))
        stale = schedule.staleness[:ranks]
        lowered = lower(schedule, StageEdges.chain(schedule.request.num_stages))
        sent = sum(i.op in SENDS for line in lowered.rows for i in line)
        each = sent / (schedule.request.num_microbatches * schedule.request.num_minibatches)
        cells = [row.label, *idle, *(_listed(values) for values in (kept, versions, stale)), f"{each:g}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _schedule(row: Row, ranks: int, microbatches: int, minibatches: int) -> Schedule:
    layout = looped(ranks, row.per_rank, microbatches)
    spec = ScheduleSpec(layout.stage_ranks, microbatches, minibatches, options=dict(row.options))
    return make(row.name, spec)


def _idle(row: Row, ranks: int, microbatches: int) -> float:
    """Return the idle part of a minibatch once the pipeline is full: of a longer window minus a shorter one."""
    figures = costs(ranks * row.per_rank, 1 / row.per_rank, 2 / row.per_rank)
    long, short = (simulate(_schedule(row, ranks, microbatches, n), figures) for n in (2 * WINDOW, WINDOW))
    busy = sum(long.busy_seconds(rank) - short.busy_seconds(rank) for rank in range(ranks))
    return 1 - busy / (ranks * (long.seconds - short.seconds))


def _per_rank(schedule: Schedule, row: Row, sizes: StageBytes) -> list[float]:
    """Return the peak of every rank, in hundredths of a rank's part of the model."""
    return [peak / 100 for peak in peak_bytes(schedule, [sizes] * schedule.request.num_stages)]


def _listed(values: Sequence[float]) -> str:
    """Return the values of the ranks, or one if they are equal."""
    texts = [f"{value:g}" for value in values]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def files() -> dict[Path, str]:
    """Return the text of every file. Raises: ValueError if the page has no place for the table."""
    page = PAGE.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE} has no lines {BEGIN} and {END}")
    texts = {PICTURES / name: text for name, text in pictures().items()}
    return texts | {PAGE: f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"}


def main() -> int:
    """Write the files, or compare them; return the exit code."""
    return write_or_compare(files(), PICTURES.glob("*.svg"))


if __name__ == "__main__":
    sys.exit(main())

"""Layouts of schedules: ranks of every stage, and random requests that a schedule accepts."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from autopipe.ir.schedule import ScheduleSpec, StageEdges
from autopipe.schedules import REGISTRY, make, to_csv
from autopipe.schedules.kind import ScheduleKind, line


def dealt(n: int, v: int, m: int, minibatches: int = 1, *, d: int = 1, apart: bool = False) -> ScheduleSpec:
    """Return v stages on each of n groups of d ranks, which are neighbours, or n apart."""
    groups = [tuple(g + n * k if apart else g * d + k for k in range(d)) for g in range(n)]
    return ScheduleSpec(tuple(groups[s % n] for s in range(n * v)), m, minibatches)


def refusable(n: int, v: int, m: int, d: int) -> bool:
    """Return whether a pipeline of n ranks would have to run its share of m microbatches in unequal rounds."""
    return v > 1 and any(share >= 2 * n and share % (share // n) for share in (m // d, -(-m // d)))


def replicated(*counts: int) -> tuple[tuple[int, ...], ...]:
    starts = [sum(counts[:s]) for s in range(len(counts))]
    return tuple(tuple(range(a, a + count)) for a, count in zip(starts, counts, strict=True))


@st.composite
def cases(draw: st.DrawFn) -> tuple[ScheduleKind, ScheduleSpec, StageEdges]:
    """Return a schedule, a request that it accepts, and channels with skips."""
    kind = REGISTRY[draw(st.sampled_from(sorted(REGISTRY)))]
    m, window, first = draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.integers(0, 3))
    if kind.spills:
        layout = ((0,),) * draw(st.integers(1, 6))
    elif kind.several_stages and draw(st.booleans()):
        n, v, d = draw(st.integers(1, 4)), draw(st.integers(2, 3)), draw(st.integers(1, 3))
        layout = dealt(n, v, m, d=d, apart=draw(st.booleans())).stage_ranks
        if kind.name == "custom":
            m *= d
        while kind.name != "gpipe" and refusable(n, v, m, d):
            m += d if kind.name == "custom" else 1
    elif kind.equal_replicas:
        layout = dealt(draw(st.integers(1, 5)), 1, m, d=draw(st.integers(1, 4)), apart=draw(st.booleans())).stage_ranks
    elif kind.replicas:
        layout = replicated(*draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
    else:
        layout = line(draw(st.integers(1, 8)), m).stage_ranks
    options = {o.name: draw(st.integers(o.minimum, min(o.maximum, 3))) for o in kind.options if o.maximum < 1000}
    if kind.name == "2bw":
        m += options["depth"] * sum(len(ranks) for ranks in layout)
    request = ScheduleSpec(layout, m, window, first, options)
    if kind.name == "custom":
        several = len({rank for ranks in layout for rank in ranks}) < sum(len(ranks) for ranks in layout)
        base = make("interleaved" if several else "1f1b", ScheduleSpec(layout, m))
        request = replace(request, text=to_csv(base))
    p = len(layout)
    skips = draw(st.sets(st.tuples(st.integers(0, p - 1), st.integers(0, p - 1)), max_size=4))
    forward = sorted({(s, s + 1) for s in range(p - 1)} | {(a, b) for a, b in skips if a < b})
    return kind, request, StageEdges(tuple(forward), tuple((b, a) for a, b in forward))

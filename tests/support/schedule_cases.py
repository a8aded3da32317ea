"""Cases of the schedule tests: layouts, and the refusals of each schedule by docs/semantics.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from autopipe.errors import AutopipeError, PlanError
from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan, Stage
from autopipe.ir.profile import Measurement, NodeCost
from autopipe.planning.cost.atoms import Atoms, may_run_twice
from autopipe.schedules import REGISTRY
from autopipe.verify.check import compare
from autopipe.verify.comparison import Comparison
from support.pipelines import Captured, build, captured, minibatches, plan_for

# custom grids have separate tests
SCHEDULES = tuple(name for name in REGISTRY if name != "custom")
REPLICAS = ((1,), (1, 1), (1, 1, 1), (1, 1, 1, 1), (2, 1), (1, 2), (2, 2), (3, 1))
MODELS = ("gpt", "resnet", "unet", "seq2seq_lstm", "hf_llama")
MICROBATCHES = ("p", "p + 1", "2p", "8")
BATCH, LAST, STEPS = 8, 5, 6
RECOMPUTE = (("never",), ("stage",), ("block",), ("never", "stage"), ("block", "never", "stage"))


@dataclass(frozen=True)
class Case:
    """``replicas[s]``: ranks of stage s, and of stages s + p, s + 2p, ... if there are ``loops``: stages per rank.

    ``recompute``: by stage, repeated.
    """

    schedule: str
    model: str
    replicas: tuple[int, ...]
    microbatches: str
    recompute: tuple[str, ...] = ("never",)
    loops: int = 1
    vertical_sync: bool = False

    @property
    def m(self) -> int:
        p = len(self.replicas)
        return {"1": 1, "2": 2, "p": p, "p + 1": p + 1, "2p": 2 * p, "8": 8}[self.microbatches]

    @property
    def num_stages(self) -> int:
        return len(self.replicas) * self.loops

    def plan(self, subject: Captured) -> Plan:
        """Return the cuts of a plan without replicas, on these ranks under this schedule."""
        straight = plan_for(subject, self.num_stages, "gpipe", self.m, BATCH)
        options = {"vertical_sync": 1} if self.vertical_sync else {}
        return laid_out(straight, self.schedule, self.ranks, self.recompute, options, subject.capture.graph)

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        p = len(self.replicas)
        ends = [sum(self.replicas[: stage + 1]) for stage in range(p)]
        groups = [tuple(range(end - count, end)) for end, count in zip(ends, self.replicas, strict=True)]
        return tuple(groups[stage % p] for stage in range(self.num_stages))

    @property
    def stage_replicas(self) -> tuple[int, ...]:
        """The number of ranks of every stage."""
        return self.replicas * self.loops

    def warmups(self) -> list[int]:
        """Return the microbatches that each stage, with all replicas, forwards before its first backward."""
        counts = []
        for stage, count in enumerate(self.replicas):
            later = sum(self.replicas[stage + 1 :])
            counts.append(-(-later // count) * count)
        return counts

    def staleness(self) -> list[int]:
        """Return the staleness by the table of docs/semantics.md: (p - 1 - s) / m without replicas and loops."""
        if self.schedule == "2bw":
            return [1] * self.num_stages
        if self.schedule != "pipedream":
            return [0] * self.num_stages
        deltas = [-(-ahead // self.m) for ahead in self.warmups()]
        return [max(deltas)] * self.num_stages if self.vertical_sync else deltas

    def refused_for(self, plan: Plan) -> tuple[int, ...] | None:
        """Return the numbers that a refusal must name, or None if the case must run."""
        p, ranks = self.num_stages, sum(self.replicas)
        if self.schedule in ("interleaved", "zero-bubble"):
            if len({*self.replicas}) > 1:
                return p, ranks
            groups, d = len(self.replicas), self.replicas[0]
            for share in (self.m // d, -(-self.m // d)):
                rounds = max(share // groups, 1) if self.loops > 1 else 1
                if share % rounds:
                    return self.m, groups, rounds
        if self.schedule == "2bw" and self.m < self.warmups()[0]:
            return self.warmups()[0], self.m
        deltas = self.staleness()
        for tie in plan.ties:
            stages = (tie.owner, *tie.copies)
            if len({deltas[stage] for stage in stages}) > 1:
                return stages + tuple(deltas[stage] for stage in stages)
        return None


def laid_out(
    plan: Plan,
    schedule: str,
    ranks: tuple[tuple[int, ...], ...],
    recompute: tuple[str, ...] = ("never",),
    options: dict[str, int] | None = None,
    graph: Graph | None = None,
) -> Plan:
    """Return a plan with the same cuts on other ranks, under another schedule. ``graph``: needed for ``block``.

    If its stages take turns on a device, they are all on rank 0, and recomputed.
    """
    spills = REGISTRY[schedule].spills
    if spills:
        ranks, recompute = ((0,),) * len(plan.stages), ("stage",)
    stages = tuple(
        recomputing(
            replace(stage, ranks=ranks[stage.index], spilled=spills), recompute[stage.index % len(recompute)], graph
        )
        for stage in plan.stages
    )
    world = 1 + max(rank for group in ranks for rank in group)
    return replace(plan, stages=stages, num_ranks=world, schedule=schedule, schedule_options=options or {})


def recomputing(stage: Stage, mode: str, graph: Graph | None = None) -> Stage:
    """Return the stage with a recompute mode. By block, the units are of three atoms each, and one atom is kept."""
    units: tuple[tuple[int, int], ...] = ()
    if mode == "block":
        assert graph is not None
        atoms = Atoms(graph, Cuts(graph), Measurement(1, {node.name: NodeCost(0.0, 0.0, 0, 0) for node in graph.nodes}))
        first, behind = atoms.edges.index(stage.start), atoms.edges.index(stage.stop)
        spans = ((start, min(start + 3, behind)) for start in range(first, behind, 4))
        units = tuple(
            (atoms.edges[a], atoms.edges[b])
            for a, b in spans
            if may_run_twice(atoms.cuts, atoms.edges[a], atoms.edges[b])
        )
    return replace(stage, recompute=mode if units or mode != "block" else "never", units=units)


def cases(schedule: str) -> Iterator[Case]:
    """Yield every case of a schedule."""
    kind = REGISTRY[schedule]
    for model in MODELS:
        for replicas in REPLICAS:
            for microbatches in MICROBATCHES:
                for recompute in RECOMPUTE:
                    for loops in (1, 2) if kind.several_stages and len({*replicas}) == 1 else (1,):
                        for vertical in (False, True) if schedule == "pipedream" else (False,):
                            yield Case(schedule, model, replicas, microbatches, recompute, loops, vertical)


def compared(
    subject: Captured, plan: Plan, folder: Path, *, steps: int = STEPS, last: int = LAST, **job: object
) -> Comparison:
    """Train with a plan and in a plain loop, with a ragged last minibatch; return the comparison."""
    pipeline = build(subject, plan, folder, **{"steps": steps, **job})
    items = minibatches(subject.workload, steps, plan.batch_size, last=last)
    draws = any(node.num_random for node in subject.capture.graph.nodes)
    return compare(subject.workload, pipeline.run, pipeline.job, pipeline.context, items, draws=draws)


def hold(case: Case, folder: Path) -> str:
    """Assert that a case is equal bit for bit in the plan's order of sums, or properly refused; return the outcome."""
    subject = captured(case.model)
    try:
        plan = case.plan(subject)
    except PlanError as error:  # the model has too few legal cuts
        assert f"{case.num_stages} stages requested" in str(error)
        assert re.search(r"\d+ legal cuts", str(error))
        return "uncut"
    numbers = case.refused_for(plan)
    if numbers is not None:
        try:
            build(subject, plan, folder)
        except AutopipeError as error:
            missing = [n for n in numbers if not re.search(rf"(?<!\d){n}(?!\d)", str(error))]
            assert not missing, f"{error} does not name {missing}"
            return "refused"
        raise AssertionError(f"{case} should be refused for {numbers}")
    comparison = compared(subject, plan, folder)
    wrong = [d for d in comparison.differences if not d.bitwise]
    assert comparison.promised and comparison.bitwise, (
        case,
        comparison.reasons,
        comparison.max_relative_error,
        wrong[:5],
    )
    reordered = any(stage.replicas > 1 for stage in plan.stages) or not all(tie.exact for tie in plan.ties)
    assert bool(comparison.orders) == reordered
    assert reordered or comparison.order_error == 0
    return "reordered" if reordered else "plain"

"""The best plan for a profile in PipeDream's format under PipeDream's own cost formulas, for comparison.

Every cut of the DAG is a candidate (``states``). One level of links is solved by parametric search
(``flat``). For several levels, contiguous and nested placement are tried, and the better is kept (``placed``,
``nested``). Straight pipelines, with one device per stage, and data parallelism are
members of the space.

Source: PipeDream (SOSP 2019), and its ``optimizer_graph_hierarchical.py`` for the formulas.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopipe.errors import InternalError, PlanError
from benchmarks.pipedream.file_format import LayerGraph
from benchmarks.pipedream.flat import FlatSearch, Stages
from benchmarks.pipedream.nested import Level, NestedSearch, TooManyStepsError, stages_of
from benchmarks.pipedream.placed import PlacedSearch
from benchmarks.pipedream.states import Dag, States, seconds_between

MOST_IDEALS = 20_000
MOST_CELLS = 10_000_000  # ideals times layers
MOST_PAIRS = 60_000_000  # of nested ideals: 240 MB
MOST_PAIRS_TIMES_DEVICES = 2_500_000_000  # the time of a search grows with both
LEAST_SECONDS = 1e-15
MOST_STATES_PLACED = 2_000
MOST_STATES_NESTED = 2_500
MOST_NESTED_STEPS = 1_000_000_000  # numbers computed
MOST_PLACED_STEPS = 30_000_000  # with a memory limit, for plans that leave ranks unused


@dataclass(frozen=True, slots=True)
class Machine:
    """Equal devices behind levels of links."""

    counts: tuple[int, ...]  # by link level, innermost first
    bandwidths: tuple[float, ...]  # likewise, in bytes per second
    memory_bytes: float = 0.0  # of each device; 0: no limit

    def __post_init__(self) -> None:
        if not self.counts or len(self.counts) != len(self.bandwidths) or min(self.counts) < 1:
            raise PlanError("a machine needs a count of at least 1 and a bandwidth for every link level")
        if min(self.bandwidths) <= 0:
            raise PlanError("bandwidths must be larger than 0")

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return math.prod(self.counts)


@dataclass(frozen=True, slots=True)
class LayerStage:
    """One stage of a plan."""

    layers: tuple[str, ...]  # their names
    replicas: int  # devices; in nested plans, groups of the outermost level


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A plan under PipeDream's cost model."""

    cost_seconds: float  # the bottleneck, per minibatch
    stages: tuple[LayerStage, ...]
    space: str  # a description of the search that gave it

    @property
    def configuration(self) -> str:
        """The replicas of each stage, in the notation of the papers: ``15-1``."""
        return "-".join(str(stage.replicas) for stage in self.stages)


def plan_layers(graph: LayerGraph, machine: Machine, *, straight: bool = False) -> LayerPlan:
    """Return the cheapest plan under PipeDream's formulas. ``straight``: every stage on one device.

    Raises: PlanError if no layer takes any time.
    """
    if math.fsum(graph.forward_seconds) + math.fsum(graph.backward_seconds) < LEAST_SECONDS:
        raise PlanError(
            "no layer of the profile takes any time: there is nothing to distribute over devices",
            where=f"forward_compute_time and backward_compute_time of {len(graph.names)} layers",
            remedy="take another profile",
        )
    machine = _without_trivial_levels(machine)
    search = _Search(graph, machine, straight)
    best: LayerPlan | None = None
    origin = last = None
    for states in search.spaces():
        solution = search.solve(states, best.cost_seconds if best else math.inf)
        if solution is not None:
            best, origin = solution, states
        last = states
    for candidate in (last, origin):  # the last space is the largest, but may be too large for nested placement
        if candidate is not None and search.can_nest(candidate):
            solution, finished = search.nested(candidate, best.cost_seconds if best else math.inf)
            best = solution or best
            if finished:
                break
    if best is None:  # pragma: no cover - one stage on one device always fits: nothing is in flight behind it
        raise InternalError(f"no plan of {len(graph.names)} layers on {machine.num_devices} devices")
    return best


def data_parallel_seconds(graph: LayerGraph, machine: Machine) -> float:
    """Return PipeDream's prediction for plain data parallelism over all devices, level by level."""
    seconds = math.fsum(graph.forward_seconds) + math.fsum(graph.backward_seconds)
    size, below = math.fsum(graph.parameter_bytes), 1
    for count, bandwidth in zip(machine.counts, machine.bandwidths, strict=True):
        seconds = (seconds + 4 * (count - 1) * size / (bandwidth * count) / below) / count
        below = count
    return seconds


def _without_trivial_levels(machine: Machine) -> Machine:
    levels = [(c, b) for c, b in zip(machine.counts, machine.bandwidths, strict=True) if c > 1]
    levels = levels or [(1, machine.bandwidths[0])]
    return Machine(tuple(c for c, _ in levels), tuple(b for _, b in levels), machine.memory_bytes)


class _Search:
    """The search for one graph on one machine: its state spaces, and the solution of each."""

    def __init__(self, graph: LayerGraph, machine: Machine, straight: bool) -> None:
        self.graph, self.machine, self.straight = graph, machine, straight
        self.limit = machine.memory_bytes or math.inf
        self.dag = Dag(graph)
        self.orders: dict[str, list[int]] = {}
        self.most_pairs = min(MOST_PAIRS, MOST_PAIRS_TIMES_DEVICES // machine.num_devices)

    def spaces(self) -> Iterator[States]:
        """Yield state spaces, small ones first: linear orders, then the lattice, or more orders if it is too large."""
        level = self.orders["level order"] = self.dag.order(deep=False)
        edges = set(self.graph.edges)
        if all(pair in edges for pair in itertools.pairwise(level)):
            # the layers are one path, whose prefixes are all ideals
            yield self.dag.chain_states(level, "level order")
            return
        deep = self.orders["deep order"] = self.orders["lattice"] = self.dag.order(deep=True)
        most = MOST_IDEALS if len(self.machine.counts) == 1 else MOST_STATES_PLACED
        ideals = self.dag.ideals(deep, min(most, MOST_CELLS // self.dag.count))
        lattice = None if ideals is None else self.dag.lattice_states(deep, ideals, self.most_pairs)
        if lattice is None:
            yield from self._many_orders(deep)
            return
        yield self.dag.chain_states(level, "level order")
        yield self.dag.chain_states(deep, "deep order")
        yield lattice

    def _many_orders(self, deep: list[int]) -> Iterator[States]:
        """Yield four or six linear orders, and the ideals of all of them together if these are few enough."""
        ideal_set: dict[int, None] = {}
        place = {layer: index for index, layer in enumerate(deep)}
        # with several levels, an order of thousands of layers takes half a second
        few = len(self.machine.counts) > 1 and self.dag.count > MOST_STATES_PLACED // 2
        for ties in ("first", "last") if few else ("first", "last", "listed"):
            for deeply in (False, True):
                name = f"{'deep' if deeply else 'level'} order, {ties} first"
                order = self.orders[name] = self.dag.order(deep=deeply, ties=ties)
                yield self.dag.chain_states(order, name)
                ideal_set.update(dict.fromkeys(itertools.accumulate((1 << place[layer] for layer in order), initial=0)))
        if len(ideal_set) <= MOST_STATES_PLACED:
            ideals = sorted(ideal_set, key=lambda ideal: (ideal.bit_count(), ideal))
            lattice = self.dag.lattice_states(deep, ideals, self.most_pairs)
            if lattice is not None:
                yield lattice

    def solve(self, states: States, known: float) -> LayerPlan | None:
        """Return the best plan over the states, with contiguous placement, if it is cheaper than ``known``."""
        machine = self.machine
        if len(machine.counts) == 1:
            search = FlatSearch(states, machine.bandwidths[0], self.limit, self.straight)
            cost, stages = search.solve(machine.counts[0], known)
        else:
            cost, stages = self._contiguous(states, known)
        if cost >= known:
            return None
        return self._plan(states, cost, stages, "contiguous, " if len(machine.counts) > 1 else "")

    def _contiguous(self, states: States, known: float) -> tuple[float, Stages]:
        """Return the cost and stages of the best contiguous placement cheaper than ``known``, or infinity.

        With a memory limit, each number of ranks in use is a search of its own, the largest first: the memory of a
        stage grows with the ranks that are behind it. A single rank always fits, because none is behind it.
        """
        machine, seconds = self.machine, float(states.seconds[-1])
        widths = tuple(itertools.accumulate(machine.counts, operator.mul, initial=1))
        best: tuple[float, Stages] = (math.inf, [])
        steps = [0, 0]

        def solve(ranks: int, limit: float, below: float, more: int) -> tuple[float, Stages]:
            steps[1] = steps[0] + more
            search = PlacedSearch(states, widths, machine.bandwidths, ranks, self.straight)
            return search.solve(limit, below, steps)

        everything, enough = machine.num_devices, 2**62
        least, stages = solve(everything, math.inf, known, enough)
        if self.limit >= math.inf:
            return least, stages
        if least >= known:
            return best
        end = enough
        for ranks in (*range(everything, 0, -1), 1):
            below = min(known, best[0], seconds * (1 + 1e-9))
            if below <= least * (1 + 1e-12) or (seconds / ranks >= below and best[1]):
                break
            cost, stages = solve(ranks, self.limit, below, enough if ranks in (everything, 1) else end - steps[0])
            if cost < below:
                best = cost, stages
            if ranks == everything:
                end = steps[0] + MOST_PLACED_STEPS
            elif steps[0] > end and best[1]:
                break
        return best

    def can_nest(self, states: States) -> bool:
        """Return whether nested placement is possible, and its tables of all pairs fit in memory."""
        if len(self.machine.counts) == 1 or self.straight:
            return False
        return states.count <= MOST_STATES_NESTED

    def nested(self, states: States, known: float) -> tuple[LayerPlan | None, bool]:
        """Return the best nested plan if it is cheaper than ``known``, and whether the limit of steps was enough."""
        counts, bandwidths = self.machine.counts, self.machine.bandwidths
        # a stable order: no state comes before one that it contains, even if rounding affects layers that take no time
        order = np.argsort(np.round(states.seconds / states.seconds[-1], 12), kind="stable")
        C, P, X = states.seconds[order], states.parameters[order], states.crossing[order]
        search = NestedSearch(C, P, X, P + states.activations[order], self.limit, MOST_NESTED_STEPS)
        V = seconds_between(states)[np.ix_(order, order)]
        below, ranks = 1, 1
        try:
            for level, (count, bandwidth) in enumerate(zip(counts[:-1], bandwidths, strict=False)):
                groups = counts[-1] if level == len(counts) - 2 and known < math.inf else 0
                V = Level(search, V, count, bandwidth, below).pieces(ranks, groups, known)
                ranks *= count
                below = count
            W, back = Level(search, V, counts[-1], bandwidths[-1], below).heads()
        except TooManyStepsError:
            return None, False
        cost = float(W[-1, -1])
        if cost >= known:
            return None, True
        stages = [(int(order[i]), int(order[j]), groups) for i, j, groups in stages_of(back, counts[-1])]
        return self._plan(states, cost, stages, "nested (groups), "), True

    def _plan(self, states: States, cost: float, rows: Stages, how: str) -> LayerPlan:
        order = self.orders[states.space]
        stages = []
        for i, j, replicas in rows:
            if states.chain:
                layers = order[i:j]
            else:
                inside = states.ideals[j] & ~states.ideals[i]
                layers = [layer for place, layer in enumerate(order) if inside >> place & 1]
            stages.append(LayerStage(tuple(self.graph.names[layer] for layer in layers), replicas))
        return LayerPlan(cost, tuple(stages), how + states.space)

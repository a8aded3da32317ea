"""``Program``: a lowered schedule for repeated simulations that need no timeline, only seconds.

The order in which ``simulate`` visits the instructions does not depend on the costs, and neither do the messages. A
program is that order, with numbers in place of the names of messages, links and reductions. ``run`` makes the same
additions in the same order as ``simulate``, so the times are equal, to the last bit.

``least_seconds`` is a lower bound for any schedule with a flush, from the costs alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.ir.schedule import COMPUTE, Op, Schedule
from autopipe.schedules.costs import FREE, Costs, EdgeCosts
from autopipe.schedules.simulate import shared_clock, simulate

_COMPUTE, _OTHER, _SEND, _RECEIVE, _REDUCE, _STEP = range(6)
# the instructions that take time by themselves, in the order of ``_durations``
_TIMED = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUTS, Op.BACKWARD_WEIGHTS, Op.STEP)
# what is done, its rank, and up to three numbers: see ``Program.run``
_Entry = tuple[int, int, int, int, int]

_Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums of a simulated timeline."""

    seconds: float  # as ``Timeline.seconds``
    busy_seconds: tuple[float, ...]  # by rank, as ``Timeline.busy_seconds``

    @property
    def bubble_fraction(self) -> float:
        """As ``Timeline.bubble_fraction``."""
        total = self.seconds * len(self.busy_seconds)
        return 1 - math.fsum(self.busy_seconds) / total if total else 0.0


class Program:
    """The instructions of a lowered schedule, in an order in which none waits for a later one.

    Raises: ScheduleError (rule ``no-deadlock``) if ranks deadlock; ValueError for a spilled schedule, whose copies take
    the lanes between host and device.
    """

    def __init__(self, schedule: Schedule) -> None:
        request = schedule.request
        if schedule.spilled:
            raise ValueError(f"{schedule.name} has copies between host and device: simulate() follows them")
        self.staleness = schedule.staleness
        self.num_ranks, self.num_stages = len(schedule.rows), request.num_stages
        self.edges: dict[tuple[int, int], int] = {}
        self.links: dict[tuple[int, int], int] = {}
        self.replicas = request.stage_ranks
        self.num_messages = 0
        self.reductions: dict[tuple[int, int], int] = {}
        self.sums: dict[tuple[tuple[int, ...], int], int] = {}  # those of the same ranks and minibatch follow another
        self._reached: dict[int, int] = {}
        self._sent: dict[tuple[int, int, int, int], int] = {}
        self._entries: list[_Entry] = []
        if not self._order(schedule):
            simulate(schedule, Costs.uniform(self.num_stages))  # raises the error that names the blocked ranks

    def _order(self, schedule: Schedule) -> bool:
        """Put the instructions in order, and return whether they all run."""
        position = [0] * self.num_ranks
        waiting: dict[object, list[int]] = {}
        ready = list(range(self.num_ranks))[::-1]
        rank_of, entries, sent = schedule.request.rank_of, self._entries, self._sent
        timed = {op: index * self.num_stages for index, op in enumerate(_TIMED)}
        while ready:
            rank = ready.pop()
            row, index = schedule.rows[rank], position[rank]
            while index < len(row):
                i = row[index]
                op = i.op
                if op in COMPUTE:
                    entries.append((_COMPUTE, rank, timed[op] + i.stage, 0, 0))
                elif op in (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD):
                    message = (i.peer, i.stage, i.minibatch, i.microbatch)
                    slot = sent.pop(message, None)
                    if slot is None:
                        waiting.setdefault(message, []).append(rank)
                        break
                    entries.append((_RECEIVE, rank, self._edge(i.peer, i.stage), slot, 0))
                elif op == Op.REDUCE:
                    ready.extend(self._reduce(rank, i.stage, i.minibatch, waiting))
                elif op == Op.STEP:
                    reduction = self.reductions.get((i.stage, i.minibatch))
                    if reduction is not None:
                        if self._reached[reduction] < len(self.replicas[i.stage]):
                            waiting.setdefault(reduction, []).append(rank)
                            break
                        if len(self.replicas[i.stage]) > 1:
                            entries.append((_STEP, rank, reduction, 0, 0))
                    entries.append((_OTHER, rank, timed[op] + i.stage, 0, 0))
                else:
                    message = (i.stage, i.peer, i.minibatch, i.microbatch)
                    ends = rank, rank_of(i.peer, i.minibatch, i.microbatch)
                    link = self.links.setdefault(ends, len(self.links))
                    sent[message] = self.num_messages
                    entries.append((_SEND, rank, self._edge(i.stage, i.peer), self.num_messages, link))
                    self.num_messages += 1
                    ready.extend(waiting.pop(message, ()))
                index += 1
            position[rank] = index
        return all(position[rank] == len(row) for rank, row in enumerate(schedule.rows))

    def _edge(self, source: int, target: int) -> int:
        return self.edges.setdefault((source, target), len(self.edges))

    def _reduce(self, rank: int, stage: int, minibatch: int, waiting: dict[object, list[int]]) -> Sequence[int]:
        """Add a REDUCE, and return the ranks that waited for it as the last one of its reduction."""
        reduction = self.reductions.setdefault((stage, minibatch), len(self.reductions))
        self._reached[reduction] = self._reached.get(reduction, 0) + 1
        ended = self._reached[reduction] == len(self.replicas[stage])
        key = (self.replicas[stage], minibatch)
        total = self.sums.setdefault(key, len(self.sums)) if ended else -1
        self._entries.append((_REDUCE, rank, stage, reduction, total))
        return waiting.pop(reduction, ()) if ended else ()

    def run(self, costs: Costs) -> Totals:
        """Return the totals with these costs."""
        clock = [0.0] * self.num_ranks
        busy: list[list[tuple[float, float]]] = [[] for _ in clock]
        other: list[tuple[float, float]] = []  # when a rank works and does not compute
        arrivals, free = [0.0] * self.num_messages, [0.0] * len(self.links)
        latest, reduced = [0.0] * len(self.reductions), [0.0] * len(self.reductions)
        ends = [-1.0] * len(self.sums)  # of the last reduction of each sum so far
        durations = _durations(costs)
        edges = [costs.edges.get(edge, FREE) for edge in self.edges]
        send, receive = [edge.send_seconds for edge in edges], [edge.receive_seconds for edge in edges]
        occupied, latency = [edge.occupancy_seconds for edge in edges], [edge.latency_seconds for edge in edges]
        for kind, rank, a, b, c in self._entries:
            now = clock[rank]
            if kind == _COMPUTE:
                end = now + durations[a]
                busy[rank].append((now, end))
                clock[rank] = end
            elif kind == _SEND:
                clock[rank] = arrival = now + send[a]
                other.append((now, arrival))
                if occupied[a]:
                    arrival = max(arrival, free[c]) + occupied[a]
                    free[c] = arrival
                arrivals[b] = arrival + latency[a]
            elif kind == _RECEIVE:
                begin = max(now, arrivals[b])
                clock[rank] = begin + receive[a]
                other.append((begin, clock[rank]))
            elif kind == _OTHER:
                clock[rank] = now + durations[a]
                other.append((now, clock[rank]))
            elif kind == _STEP:
                clock[rank] = max(now, reduced[a])
            else:
                latest[b] = max(latest[b], now)
                if c >= 0:
                    of_stage = costs.stages[a]
                    ended = of_stage.reduced(latest[b])
                    if ends[c] >= 0:
                        ended = max(ended, ends[c] + of_stage.reduce_seconds)
                    reduced[b] = ends[c] = ended
        if not 0 < costs.cores < self.num_ranks:
            return Totals(max(clock), tuple(math.fsum(end - begin for begin, end in each) for each in busy))
        at = shared_clock([*itertools.chain.from_iterable(busy), *other], costs.cores)
        return Totals(at(max(clock)), tuple(math.fsum(at(end) - at(begin) for begin, end in each) for each in busy))


def _durations(costs: Costs) -> list[float]:
    stages = costs.stages
    return [
        *(stage.forward_seconds for stage in stages),
        *(stage.backward_seconds for stage in stages),
        *(stage.input_seconds for stage in stages),
        *(stage.weight_seconds for stage in stages),
        *(stage.step_seconds for stage in stages),
    ]


def least_seconds(costs: Costs, num_microbatches: int, forward: Sequence[_Edge], backward: Sequence[_Edge]) -> float:
    """Return a time that ``simulate`` cannot be below, in any order of the m microbatches, with a rank for each stage.

    Stage s begins when the first microbatch has passed the stages that it receives from. It then computes all m
    forwards and backwards, with their sends and receives, and ends with a backward. That microbatch must still pass the
    stages that receive its gradient, and each steps. No backward may be split.

    ``forward`` and ``backward``: the edges of the messages, (from stage, to stage). Sums are rounded in another order
    than those of ``simulate``, so the bound is a little lower than their sum.
    """
    count, stages, m = len(costs.stages), costs.stages, num_microbatches
    into: list[list[int]] = [[] for _ in range(count)]  # by stage, the stages that it receives from
    out: list[list[int]] = [[] for _ in range(count)]  # and those to which it sends gradients
    per_microbatch = [stage.forward_seconds + stage.backward_seconds for stage in stages]
    missing = [0.0] * count  # the receives before the first forward, and the sends behind the last backward
    for a, b in forward:
        into[b].append(a)
        per_microbatch[a] += _edge(costs, a, b).send_seconds
        per_microbatch[b] += _edge(costs, a, b).receive_seconds
        missing[b] += _edge(costs, a, b).receive_seconds
    for a, b in backward:
        out[a].append(b)
        per_microbatch[a] += _edge(costs, a, b).send_seconds
        per_microbatch[b] += _edge(costs, a, b).receive_seconds
        missing[a] += _edge(costs, a, b).send_seconds
    begin, rest = [0.0] * count, [stage.step_seconds for stage in stages]
    for s in range(count):
        begin[s] = max((begin[a] + stages[a].forward_seconds + _passing(costs, a, s) for a in into[s]), default=0.0)
        behind = (_passing(costs, s, b) + stages[b].backward_seconds + rest[b] for b in out[s])
        rest[s] = max(rest[s], *behind) if out[s] else rest[s]
    return (1 - 1e-9) * max(begin[s] + m * per_microbatch[s] - missing[s] + rest[s] for s in range(count))


def _edge(costs: Costs, a: int, b: int) -> EdgeCosts:
    return costs.edges.get((a, b), EdgeCosts())


def _passing(costs: Costs, a: int, b: int) -> float:
    """Return the seconds from the end of a computation to the start of the one that needs its message."""
    edge = _edge(costs, a, b)
    return edge.send_seconds + edge.occupancy_seconds + edge.latency_seconds + edge.receive_seconds

"""The simulator: a lowered schedule and its costs to a ``Timeline``.

The simulation needs no event queue. It advances a rank along its row until the rank needs a message that has not been
sent, or a reduction that not all replicas have reached. The rank resumes when another rank provides that. Every
instruction is visited once, so the time is linear in their number. A link has one sender, so its messages have the
order of the sender's row, and the result does not depend on the order in which ranks are visited.

L, O and U take a lane between host and device (``lanes``), and of the rank's time only what begins the copy.

Sends never block (beyond ``send_seconds``), and neither does R. The step waits until all replicas have reached their R
and the gradients are added; the span of the reduction is that wait. An instruction that takes no time and does not wait
has no span.

Ranks that share the cores of their host take turns while more of them work than there are cores. All of them then work
at the same rate, as under a fair scheduler: time passes ``ranks at work / cores`` times as slowly as with a core for
each. The order of the simulated events stays as it is.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import COPIES, Instruction, Op, Schedule, StageEdges
from autopipe.ir.timeline import Span, Timeline
from autopipe.schedules.costs import FREE, Costs
from autopipe.schedules.lower import lower
from autopipe.schedules.rows import marked
from autopipe.schedules.spilling.lanes import Lanes
from autopipe.schedules.spilling.spill import OPTIMIZER_SLABS

Message = tuple[int, int, int, int]
Reduction = tuple[int, int]

_Interval = tuple[float, float]


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Return the simulated timeline. A schedule without messages is lowered first, for a plain chain of stages.

    Raises: ScheduleError (rule ``no-deadlock``) if ranks deadlock.
    """
    if len(costs.stages) != schedule.request.num_stages:
        raise ScheduleError(f"costs of {len(costs.stages)} stages were given for {schedule.request.num_stages} stages")
    if not schedule.lowered:
        schedule = lower(schedule, StageEdges.chain(schedule.request.num_stages))
    return _Simulation(schedule, costs).run()


class _Simulation:
    """The state of a simulation: the position and time of each rank, messages in transit, and waiting ranks."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.clock = [0.0] * len(schedule.rows)
        self.position = [0] * len(schedule.rows)
        self.arrivals: dict[Message, float] = {}
        self.waiting: dict[Message, int] = {}  # the rank that waits for a message
        self.link_free: dict[tuple[int, int], float] = {}
        self.reached: dict[Reduction, dict[int, float]] = {}  # when each replica reached its R
        self.reduced_at: dict[Reduction, float] = {}  # when a reduction that all replicas have reached ends
        self.adding: dict[tuple[tuple[int, ...], int], float] = {}  # when the ranks end those of a minibatch so far
        self.stepping: dict[Reduction, list[int]] = {}  # the ranks whose step waits for a reduction
        self.ready = list(range(len(schedule.rows)))[::-1]
        slabs = schedule.request.options.get(OPTIMIZER_SLABS.name, OPTIMIZER_SLABS.default)
        self.lanes = [Lanes(costs.spill, slabs) for _ in schedule.rows] if schedule.spilled else []
        self.spans: list[list[Span]] = [[] for _ in schedule.rows]  # by rank, and so in order of time
        self.work: list[_Interval] = []  # when a rank uses a core, if ranks share them
        self.share = 0 < costs.cores < len(schedule.rows)
        self.durations = {
            Op.FORWARD: [stage.forward_seconds for stage in costs.stages],
            Op.BACKWARD: [stage.backward_seconds for stage in costs.stages],
            Op.BACKWARD_INPUTS: [stage.input_seconds for stage in costs.stages],
            Op.BACKWARD_WEIGHTS: [stage.weight_seconds for stage in costs.stages],
            Op.STEP: [stage.step_seconds for stage in costs.stages],
        }

    def run(self) -> Timeline:
        while self.ready:
            self._follow(self.ready.pop())
        rows = self.schedule.rows
        stuck = [rank for rank, row in enumerate(rows) if self.position[rank] < len(row)]
        if stuck:
            raise self._deadlock(stuck)
        spans = tuple(itertools.chain.from_iterable(self.spans))
        if self.share:
            at = shared_clock(self.work, self.costs.cores)
            spans = tuple(Span(s.rank, s.instruction, at(s.start_seconds), at(s.end_seconds)) for s in spans)
        return Timeline("simulated", len(rows), spans)

    def _follow(self, rank: int) -> None:
        """Advance a rank along its row, to its end or to an instruction that has to wait."""
        row, durations, spans, arrivals = self.schedule.rows[rank], self.durations, self.spans[rank], self.arrivals
        edges, now = self.costs.edges, self.clock[rank]
        lanes = self.lanes[rank] if self.lanes else None
        index = self.position[rank]
        while index < len(row):
            i = row[index]
            op, start = i.op, now
            if lanes is not None:
                if op in COPIES:
                    begin, end = lanes.copy(i, now)
                    if end > begin:
                        spans.append(Span(rank, i, begin, end))
                    now += self.costs.spill[i.stage].begin if self.costs.spill else 0.0
                    index += 1
                    continue
                now = start = lanes.ready(i, now)
            if op == Op.STEP and (i.stage, i.minibatch) in self.reached:
                finish = self._reduced(rank, i, now)
                if finish is None:
                    break
                if finish > now:
                    spans.append(Span(rank, Instruction(Op.REDUCE, i.stage, i.minibatch), now, finish))
                    now = start = finish
            seconds, works_from = durations.get(op), now
            if seconds is not None:
                now += seconds[i.stage]
            elif op in (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD):
                message = (i.peer, i.stage, i.minibatch, i.microbatch)
                arrival = arrivals.pop(message, None)
                if arrival is None:
                    self.waiting[message] = rank
                    break
                works_from = max(now, arrival)
                now = works_from + edges.get((i.peer, i.stage), FREE).receive_seconds
            elif op == Op.REDUCE:
                self._reach_reduction(rank, i, now)
            else:
                now = self._send(rank, i, now)
            if now > start:
                spans.append(Span(rank, i, start, now))
            if self.share:
                self.work.append((works_from, now))
            index += 1
        self.position[rank], self.clock[rank] = index, now

    def _send(self, rank: int, i: Instruction, now: float) -> float:
        edge = self.costs.edges.get((i.stage, i.peer), FREE)
        now += edge.send_seconds
        arrival = now
        if edge.occupancy_seconds:
            link = rank, self.schedule.request.rank_of(i.peer, i.minibatch, i.microbatch)
            arrival = max(now, self.link_free.get(link, 0.0)) + edge.occupancy_seconds
            self.link_free[link] = arrival
        message = (i.stage, i.peer, i.minibatch, i.microbatch)
        self.arrivals[message] = arrival + edge.latency_seconds
        waiter = self.waiting.pop(message, None)
        if waiter is not None:
            self.ready.append(waiter)
        return now

    def _reach_reduction(self, rank: int, i: Instruction, now: float) -> None:
        """Record that a replica has reached its R. The last one wakes the ranks whose step waits.

        If the ranks have several stages, they add the gradients of one after the other, in the order of their R.
        """
        reduction = i.stage, i.minibatch
        reached = self.reached.setdefault(reduction, {})
        reached[rank] = now
        replicas = self.schedule.request.stage_ranks[i.stage]
        if len(reached) == len(replicas):
            costs, key = self.costs.stages[i.stage], (replicas, i.minibatch)
            ended = costs.reduced(max(reached.values()))
            if key in self.adding:
                ended = max(ended, self.adding[key] + costs.reduce_seconds)
            self.reduced_at[reduction] = self.adding[key] = ended
            self.ready.extend(self.stepping.pop(reduction, ()))

    def _reduced(self, rank: int, i: Instruction, now: float) -> float | None:
        """Return when a step may begin, or None if not all replicas have reached the reduction."""
        reduction = i.stage, i.minibatch
        replicas, reached = self.schedule.request.stage_ranks[i.stage], self.reached[reduction]
        if len(reached) < len(replicas):
            self.stepping.setdefault(reduction, []).append(rank)
            return None
        if len(replicas) == 1:
            return now
        return max(now, self.reduced_at[reduction])

    def _deadlock(self, stuck: list[int]) -> ScheduleError:
        rank = stuck[0]
        index = self.position[rank]
        waits = ", ".join(f"rank {r} at {self.schedule.rows[r][self.position[r]]}" for r in stuck[:4])
        more = ", ..." if len(stuck) > 4 else ""
        return ScheduleError(
            f"deadlock: {len(stuck)} of {len(self.schedule.rows)} ranks are blocked: {waits}{more}",
            rule="no-deadlock",
            grid=marked(self.schedule, rank, index),
            where=f"rank {rank}, instruction {index}",
            remedy="order the rows so that an instruction comes before those that wait for it",
        )


def shared_clock(work: Sequence[_Interval], cores: float) -> Callable[[float], float]:
    """Return a function from a time with a core for each rank to the time with ``cores`` for all of them.

    ``work``: when a rank works, from and to, for all ranks.
    """
    changes: dict[float, int] = {}
    for start, end in work:
        if end > start:
            changes[start] = changes.get(start, 0) + 1
            changes[end] = changes.get(end, 0) - 1
    before = sorted(changes)
    after: list[float] = []
    rates: list[float] = []
    active = 0
    now = before[0] if before else 0.0
    for index, time in enumerate(before):
        if index:
            now += (time - before[index - 1]) * rates[-1]
        active += changes[time]
        after.append(now)
        rates.append(max(1.0, active / cores))

    def at(time: float) -> float:
        index = bisect.bisect_right(before, time) - 1
        return time if index < 0 else after[index] + (time - before[index]) * rates[index]

    return at

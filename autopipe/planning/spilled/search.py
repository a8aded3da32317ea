"""The search for stages that take turns on one device: the cuts, and what is on the device at a time.

With b the bandwidth between host and device, m microbatches, and for a stage F and B the seconds of a microbatch, W its
weights and O its optimizer state, all stages of a minibatch take about::

    sum of  max(m F, W / b)  +  max(m (2 F + B), (W + O) / b)

because the copies to the device, those to the host, and the computation overlap, and every forward runs twice. What a
stage needs besides the slabs (its gradients, casts, and the activations of one microbatch) must fit beside them, and
how large the slabs are depends on the largest stage. So for each of some bounds on the weights of a stage, the cuts
with the least sum are found by dynamic programming over all pairs of cuts, in O(n^2). The plans are then counted
(``costs.peaks_of``) and simulated; if a plan needs more than there is, its bound is searched again with that much less.

Source: Hydra, arXiv:2110.08633, section 4.1, cuts shards by trying what fits; here nothing is tried on the device.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator

import numpy as np

from autopipe.errors import DoesNotFitError, PlanError, counted
from autopipe.ir.plan import Plan
from autopipe.planning.build import StageChoice, build_plan
from autopipe.planning.cost.pair_sum import Array
from autopipe.planning.cost.peaks import with_peaks
from autopipe.planning.cost.predict import predict
from autopipe.planning.search.problem import Problem
from autopipe.planning.spilled.costs import SpilledSums, stepping_bytes
from autopipe.schedules.spilling.spill import MESSAGES, OPTIMIZER_SLABS, SLABS
from autopipe.units import in_bytes

MARGIN = 0.08
"""The part of the memory that is left free: the estimate errs by up to 7 %."""
MOST_BOUNDS = 12
LEAST_OVERHEAD = 100e-6
"""Seconds of a forward or backward besides its operations. Of equally fast plans, one with few stages is best."""
_MOST_FITTING = 3  # plans that are simulated, of one number of slabs and place of messages
_MOST_TRIES = 40
_TOLERANCE = 0.01  # a plan that is slower by less than that is as good, if it has fewer stages


class SpilledSearch:
    """The search for one number of microbatches."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        options = problem.options
        if options.num_ranks > 1:
            raise PlanError(
                f"spilled uses one device, and {options.num_ranks} are requested: stages of a pipeline cannot be "
                "spilled yet",
                remedy="--gpus 1, or another schedule",
            )
        if options.recompute in ("never", "block"):
            raise PlanError(
                f"--recompute {options.recompute} does not work with spilled: the weights of a stage leave the device "
                "between its forward and its backward",
                remedy="--recompute auto",
            )
        self._memory = problem.device_of(0).memory_bytes
        self._room = math.floor(self._memory * (1 - MARGIN)) if self._memory else math.inf
        sums = SpilledSums(problem.atoms, problem.profile.optimizer_bytes_per_byte)
        self._slab, self._optimizer, self._buffers = sums.slabs(), sums.optimizer(), sums.buffers
        memory = problem.tables.memory
        # during a backward, and during a step
        active = memory.gradients + memory.saved + memory.workspace + sums.casts() + memory.kept
        stepping = stepping_bytes(memory.gradients, memory.largest, problem.profile.optimizer_bytes_per_byte)
        self._active: Array = np.maximum(active, memory.gradients + stepping)
        self._received = memory.kept
        self._seconds = [self._stage_seconds(messages) for messages in (0, 1)]

    def _stage_seconds(self, messages: int) -> Array:
        problem = self._problem
        device, m = problem.cluster.device(0), problem.num_microbatches
        bandwidth = device.to_host_bandwidth
        pace, each = problem.cluster.host.pace / device.speed, max(problem.cluster.host.compute_seconds, LEAST_OVERHEAD)
        forward, backward = pace * problem.tables.forward_seconds, pace * problem.tables.backward_seconds
        received = messages * m * self._received / bandwidth
        load, both = self._slab / bandwidth, (self._slab + self._optimizer) / bandwidth
        step = problem.profile.optimizer_seconds_per_byte * problem.tables.memory.stepped / device.update_speed
        there = np.maximum(m * (forward + each), load + received)
        back = np.maximum(m * (2 * forward + backward + each) + step, both + 2 * received)
        seconds: Array = there + back
        return seconds

    def best(self) -> Plan | None:
        """Return the fastest plan; None if none fits."""
        plans = [plan for slabs, messages in itertools.product((2, 1), (0, 1)) for plan in self._plans(slabs, messages)]
        least = min((plan.predicted.step_seconds for plan in plans), default=math.inf)
        good = (plan for plan in plans if plan.predicted.step_seconds <= least * (1 + _TOLERANCE))
        return min(good, key=lambda plan: (len(plan.stages), plan.predicted.step_seconds), default=None)

    def _plans(self, slabs: int, messages: int) -> Iterator[Plan]:
        given = dict(self._problem.options.schedule_options)
        if given.get(OPTIMIZER_SLABS.name, slabs) != slabs or given.get(MESSAGES.name, messages) != messages:
            return
        seen = set[tuple[int, ...]]()
        # the bounds with the least sums first, each with the bytes that its plans have exceeded the memory by
        bounds = self._bounds()
        queue = [(*cuts, bound, 0.0) for bound in bounds if (cuts := self._cuts(bound, slabs, messages, 0.0))]
        heapq.heapify(queue)
        fitting = tries = 0
        while queue and fitting < _MOST_FITTING and tries < _MOST_TRIES:
            _, starts, bound, less = heapq.heappop(queue)
            if starts in seen:
                continue
            seen.add(starts)
            tries += 1
            plan = self._plan(starts, slabs, messages)
            over = max(stage.peak_bytes for stage in plan.stages) - self._room
            if over <= 0:
                fitting += 1
                yield self._simulated(plan)
            elif (cuts := self._cuts(bound, slabs, messages, less + over)) is not None:
                heapq.heappush(queue, (*cuts, bound, less + over))
        if not fitting and (slabs, messages) == (1, 1):
            smallest = tuple(range(1, self._problem.tables.num_atoms))
            plan = self._plan(smallest, slabs, messages)
            if max(stage.peak_bytes for stage in plan.stages) <= self._room:
                yield self._simulated(plan)

    def _simulated(self, plan: Plan) -> Plan:
        return dataclasses.replace(plan, predicted=predict(plan, self._problem.profile, self._problem.cluster))

    def _bounds(self) -> list[float]:
        """Return bounds on the weights of a stage, from all of the model down to the largest atom."""
        n = self._problem.tables.num_atoms
        largest = max(float(self._slab[i, i + 1]) for i in range(n))
        whole = float(self._slab[0, n])
        if math.isinf(self._room) or whole <= largest:
            return [whole]
        steps = np.geomspace(whole, max(largest, 1.0), MOST_BOUNDS)
        return [*(math.ceil(step) for step in steps[:-1]), largest]

    def _cuts(self, bound: float, slabs: int, messages: int, less: float) -> tuple[float, tuple[int, ...]] | None:
        """Return the least sum of seconds and the starts of stages 1..; None if nothing fits.

        ``bound``: the most bytes of a stage's weights. ``less``: bytes that are left free.
        """
        n = self._problem.tables.num_atoms
        inside = np.triu(np.ones((n + 1, n + 1), dtype=bool), 1) & (self._slab <= bound)
        optimizer = float(self._optimizer[inside].max(initial=0.0))
        room = self._room - less - SLABS * min(bound, float(self._slab[0, n])) - slabs * optimizer - self._buffers
        cost = np.where(inside & (self._active <= room), self._seconds[messages], np.inf)
        best = np.full(n + 1, np.inf)
        ends = np.zeros(n + 1, dtype=np.int64)
        best[n] = 0.0
        for i in range(n - 1, -1, -1):
            sums = cost[i] + best
            ends[i] = int(sums.argmin())
            best[i] = sums[ends[i]]
        if math.isinf(best[0]):
            return None
        starts, at = [], int(ends[0])
        while at < n:
            starts.append(at)
            at = int(ends[at])
        return float(best[0]), tuple(starts)

    def _plan(self, starts: tuple[int, ...], slabs: int, messages: int) -> Plan:
        problem = self._problem
        edges = [problem.tables.edges[atom] for atom in (0, *starts, problem.tables.num_atoms)]
        m = problem.num_microbatches
        choices = [
            StageChoice(start, stop, (0,), "stage", in_flight=m, versions=1, seconds=0.0)
            for start, stop in itertools.pairwise(edges)
        ]
        plan = build_plan(problem, choices)
        options = {**plan.schedule_options, MESSAGES.name: messages, OPTIMIZER_SLABS.name: slabs}
        stages = tuple(dataclasses.replace(stage, spilled=True) for stage in plan.stages)
        plan = dataclasses.replace(plan, schedule_options=options, stages=stages)
        return with_peaks(plan, problem.profile)

    def refusal(self) -> PlanError:
        """Return the error if nothing fits: what the plan with the smallest stages needs, and for what."""
        atoms = range(self._problem.tables.num_atoms)
        plan = self._plan(tuple(atoms[1:]), 1, 1)
        worst = max(plan.stages, key=lambda stage: stage.peak_bytes)
        largest = max(atoms, key=lambda atom: float(self._slab[atom, atom + 1]))
        smaller = "use smaller microbatches (--microbatch-size 1), " if plan.microbatch_size > 1 else ""
        weights, state = self._slab[largest, largest + 1], max(self._optimizer[atom, atom + 1] for atom in atoms)
        return DoesNotFitError(
            f"even if every part of the model that cannot be divided further is a stage, {worst.label} needs "
            f"{in_bytes(math.ceil(worst.peak_bytes / (1 - MARGIN)))}, and the device has {in_bytes(self._memory)}. The "
            f"largest part is {plan.stages[largest].name}: it has {in_bytes(float(weights))} of weights, twice which "
            f"must fit, and up to {in_bytes(float(state))} are optimizer state",
            where=f"{counted(plan.num_microbatches, 'microbatch')} of {plan.microbatch_size}, schedule spilled",
            remedy=f"{smaller}use an optimizer with less state, or a device with more memory",
        )

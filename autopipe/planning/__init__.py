"""A graph's profile and a cluster become a plan. Pure arithmetic: no torch.

The objective. Stages k = 0..p-1 are runs of atoms between legal cuts; t_k is what a microbatch costs stage k, m the
number of microbatches, r_k the ranks that share stage k::

    straight, any schedule     min over cuts of  max_k t_k                                   straight.straight_cuts

where, in symbols and in this order,

    t_k = F + B (+ F with recompute) over the device's speed, plus transfers    problem.Problem.stage_seconds
    a value counts once for its producer, once for each stage that reads it     tables.build_tables
    state + (A + K) times the number in flight <= memory of the device          memory.peak_tables, memory.recount
    in flight, and weight versions, as the schedule has them                    memory.in_flight, memory.weight_versions
    a cut is legal only where the result stays the same                         ir.cuts.Cuts.legal
    the stages' parameters together are the model's, name by name               ownership.check_every_parameter
    m is at least what the schedule runs with, and at most the batch            refusals.check_microbatches

Ties are broken towards fewer stages, then earlier cuts; nothing iterates over a set.
"""

from __future__ import annotations

from autopipe.planning.api import make_plan
from autopipe.planning.options import NEEDS, PlanOptions, ScheduleNeeds

__all__ = ["NEEDS", "PlanOptions", "ScheduleNeeds", "make_plan"]

"""The planner: from the profile of a graph and a cluster to a plan. Arithmetic only: it does not import torch.

The objective. Stage k = 0..p-1 is a run of atoms between legal cuts, on r_k ranks. t_k is the cost of a microbatch at
stage k, tau_k = t_k / r_k + (all-reduce) / m its share of the period, and m the number of microbatches::

    unreplicated (r_k = 1)  min over cuts of            max_k t_k                        search.unreplicated
    asynchronous            min over cuts, replicas of  max_k tau_k                      search.bottleneck.asynchronous
    flush                   min over cuts, replicas of  (m-1) max_k tau_k + sum_k tau_k  search.bottleneck.flush

The terms and constraints, and where each is defined::

    t_k = F + B (+ R recomputed) over the device's speed, plus transfers    search.solver.stage, search.problem
    a value counts once for its producer and once for each stage that reads it  cost.pair_sum, cost.tables
    the bytes of a stage, in whole numbers, term by term                        cost.byte_sums
    state + (A + K) times the number in flight <= memory of the device          cost.memory.stage_peak
    microbatches in flight and weight versions of the schedule                  cost.memory
    a stage occupies adjacent ranks; its links are the narrowest it spans       search.replicated.placement
    a cut is legal only if the result stays the same                            ir.cuts.Cuts.legal
    the stages' parameters together are the model's, name by name               cost.ownership.check_every_parameter
    m is at least the schedule's minimum, and at most the batch size            refusals.check_microbatches

Unreplicated pipelines (which PipeDream calls straight) and data parallelism (p = 1) are members of the same space. An
unreplicated plan uses exactly the requested ranks; among equally good ones, the one with the earliest cuts is chosen.
Plans are deterministic: no loop runs over a set.

``pipedream`` contains PipeDream's own formulas, for comparison.
"""

from __future__ import annotations

from autopipe.planning.api import SearchProgress, make_best_plan, make_plan
from autopipe.planning.clusters import read_cluster, uniform_cluster
from autopipe.planning.compare import Comparison, Contender, comparison
from autopipe.planning.cut_mapping import map_cuts_to
from autopipe.planning.explain import Explanation, explain
from autopipe.planning.options import PlanOptions

__all__ = [
    "Comparison",
    "Contender",
    "Explanation",
    "PlanOptions",
    "SearchProgress",
    "comparison",
    "explain",
    "make_best_plan",
    "make_plan",
    "map_cuts_to",
    "read_cluster",
    "uniform_cluster",
]

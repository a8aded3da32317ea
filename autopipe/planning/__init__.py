"""A graph's profile and a cluster become a plan. Pure arithmetic: no torch.

The objective. Stages k = 0..p-1 are runs of atoms between legal cuts, on r_k ranks each; t_k is what a microbatch costs
stage k, tau_k = t_k / r_k + (all-reduce) / m its share of the period, m the number of microbatches::

    straight (r_k = 1)     min over cuts of            max_k t_k                        unreplicated.unreplicated_cuts
    asynchronous           min over cuts, replicas of  max_k tau_k                      search.asynchronous
    flush                  min over cuts, replicas of  (m-1) max_k tau_k + sum_k tau_k  search.flush

where, in symbols and in this order,

    t_k = F + B (+ F with recompute) over the device's speed, plus transfers    solver.stage, Problem.stage_seconds
    a value counts once for its producer, once for each stage that reads it     pair_sum.PairSum, tables.build_tables
    the bytes of a stage, in whole numbers, term by term                        byte_sums.ByteSums
    state + (A + K) times the number in flight <= memory of the device          memory.stage_peak
    in flight, and weight versions, as the schedule has them                    memory.in_flight, memory.weight_versions
    a stage lies on neighbouring ranks; its links are the narrowest it spans    replicated.placement
    a cut is legal only where the result stays the same                         ir.cuts.Cuts.legal
    the stages' parameters together are the model's, name by name               ownership.check_every_parameter
    m is at least what the schedule runs with, and at most the batch            refusals.check_microbatches

Straight pipelines and plain data parallelism (p = 1) are members of the same space. A straight plan is made for exactly
the ranks asked for; of equally good ones the one with the earliest cuts is taken. Nothing iterates over a set.

PipeDream's own formulas, for comparison, are in ``pipedream_model`` and ``kernels``.
"""

from __future__ import annotations

from autopipe.planning.api import make_best_plan, make_plan
from autopipe.planning.cluster_file import read_cluster, uniform_cluster
from autopipe.planning.compare import Comparison, Contender, comparison
from autopipe.planning.cut_mapping import map_cuts_to
from autopipe.planning.explain import Explanation, explain
from autopipe.planning.options import PlanOptions
from autopipe.planning.search.progress import SearchProgress

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

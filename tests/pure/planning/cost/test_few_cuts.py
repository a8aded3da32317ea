"""A search of a large graph considers the cuts that send the least, and the best one of each part of the graph."""

import dataclasses

import pytest
from support.planning_cases import chain, machine

from autopipe.ir.cuts import Cuts
from autopipe.ir.profile import Measurement, NodeCost
from autopipe.planning import PlanOptions, make_plan
from autopipe.planning.explain import explain
from autopipe.planning.search import few_cuts
from autopipe.planning.search.few_cuts import CUTS_PER_STAGE, KEPT_CUTS, MOST_CUTS, FewCuts, cuts_to_search


class Weighed(Cuts):
    """Cuts whose bytes are 10, 20, 30, 10, 20, 30, ... by position."""

    def crossing_bytes(self, position, batch_size):
        return 10 * (1 + position % 3)


def funnel(num_wide, num_narrow):
    """Return a profile of wide layers that take all the time, then of narrow ones that take almost none."""
    profile = chain(num_wide + num_narrow, saved=0, weight=4)
    nodes = profile.graph.nodes
    narrow = tuple(
        dataclasses.replace(node, spec=dataclasses.replace(node.spec, shape=("s0", 1))) for node in nodes[num_wide:]
    )
    costs = [NodeCost(0.01, 0.02, 2**26, 2**20)] * num_wide + [NodeCost(1e-6, 1e-6, 4, 4)] * num_narrow
    measured = Measurement(1, {node.name: cost for node, cost in zip(nodes, costs, strict=True)})
    graph = dataclasses.replace(profile.graph, nodes=(*nodes[:num_wide], *narrow))
    return dataclasses.replace(profile, graph=graph, measurements=(measured,))


def test_the_cheapest_cuts_are_kept_and_a_part_of_the_next_ones(monkeypatch):
    monkeypatch.setattr(FewCuts, "crossing_bytes", Weighed.crossing_bytes)
    monkeypatch.setattr(FewCuts, "_cheapest_of_parts", lambda self: [])
    profile = chain(31)
    cuts = Cuts(profile.graph)
    assert len(cuts.legal) == 30
    assert FewCuts(cuts, profile, 10).legal == tuple(p for p in cuts.legal if p % 3 == 0)
    cheap, next_ones = ([p for p in cuts.legal if p % 3 == k] for k in (0, 1))
    assert FewCuts(cuts, profile, 19).legal == tuple(sorted(cheap + next_ones[::2]))
    assert FewCuts(cuts, profile, 20).legal == tuple(p for p in cuts.legal if p % 3 != 2)
    assert FewCuts(cuts, profile, 5).legal == tuple(p for p in cuts.legal if p % 3 == 0)[::2]


def test_the_cheapest_cut_of_each_part_is_kept(monkeypatch):
    monkeypatch.setattr(FewCuts, "crossing_bytes", Weighed.crossing_bytes)
    monkeypatch.setattr(FewCuts, "_cheapest", lambda self: [])
    profile = chain(60)
    kept = FewCuts(Cuts(profile.graph), profile, 20).legal
    assert len(kept) == 20 and all(position % 3 == 0 for position in kept[1:])


@pytest.mark.parametrize("stages", [2, 4])
def test_cuts_where_the_work_is_are_kept_although_many_others_send_less(monkeypatch, stages):
    profile, options = funnel(80, 500), PlanOptions(num_ranks=stages, num_microbatches=8, batch_size=8)
    few = make_plan(profile, machine(stages, 1000), options)
    explanation = explain(few, profile, machine(stages, 1000), options)
    assert explanation.runner_up.predicted.step_seconds >= few.predicted.step_seconds
    monkeypatch.setattr(few_cuts, "MOST_CUTS", 1000)
    every = make_plan(profile, machine(stages, 1000), options)
    assert few.predicted.step_seconds <= 1.02 * every.predicted.step_seconds


def test_parameters_are_divided_although_they_take_no_time():
    profile = funnel(80, 500)
    heavy = {
        f"layer{k}.weight": dataclasses.replace(profile.graph.parameters[f"layer{k}.weight"], shape=(2**28,))
        for k in (10, 11)
    }
    graph = dataclasses.replace(profile.graph, parameters={**profile.graph.parameters, **heavy})
    instant = {f"layer{k}": NodeCost(0.0, 0.0, 2**26, 0) for k in range(80)}
    measured = Measurement(1, {**profile.measurements[0].costs, **instant})
    kept = cuts_to_search(Cuts(graph), dataclasses.replace(profile, graph=graph, measurements=(measured,)), 2)
    assert 11 in kept.legal


def test_small_graphs_keep_all_cuts_and_large_ones_enough():
    small, large = chain(31), chain(MOST_CUTS + 200)
    cuts, many = Cuts(small.graph), Cuts(large.graph)
    assert cuts_to_search(cuts, small, 4) is cuts
    assert CUTS_PER_STAGE * 16 <= len(cuts_to_search(many, large, 16).legal) <= 2 * KEPT_CUTS
    assert len(cuts_to_search(many, large, 40).legal) > 2 * KEPT_CUTS

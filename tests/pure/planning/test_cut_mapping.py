"""A plan for another recording: the same cuts, the nearest ones, or the reason why there is no plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from autopipe.errors import PlanError
from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph, Input, Node, Symbol
from autopipe.ir.plan import Boundary, Plan, Prediction, Stage
from autopipe.ir.profile import WorkloadSpec
from autopipe.ir.tensor import TensorSpec
from autopipe.planning import map_cuts_to
from autopipe.planning.cost.ownership import state_of_stages, unused_state
from autopipe.planning.cut_mapping import homes

SPEC = TensorSpec(("s0", 4), "float32", requires_grad=True)


def graph_of(calls: Sequence[str]) -> Graph:
    """Return a chain of calls; ``a.w`` is a call and its parameter, ``a`` a call without one."""
    nodes, before = [], "x"
    for number, call in enumerate(calls):
        target, _, parameter = call.partition(".")
        name = f"{target}_{number}"
        nodes.append(Node(name, "call_function", target, (before,), SPEC, parameters=(parameter,) if parameter else ()))
        before = name
    names = dict.fromkeys(parameter for node in nodes for parameter in node.parameters)
    parameters = {name: TensorSpec((4, 4), "float32", requires_grad=True) for name in ("w", "v", "u") if name in names}
    inputs = (Input("x", TensorSpec(("s0", 4), "float32")),)
    return Graph("toy", inputs, (Symbol("s0", "x", 0, 2),), tuple(nodes), (before,), parameters, {}, {})


def plan_of(graph: Graph, *positions: int) -> Plan:
    edges, cuts = (0, *positions, len(graph.nodes)), Cuts(graph)
    stages = []
    for index, (start, stop) in enumerate(itertools.pairwise(edges)):
        nodes = graph.nodes[start:stop]
        kept = tuple(dict.fromkeys(name for node in nodes for name in node.parameters))
        stages.append(Stage(index, start, stop, nodes[0].name, nodes[-1].name, (index,), kept, 0.0, 0.0, 0))
    boundaries = tuple(Boundary(v, p, c, cuts.spec(v), 0) for v, p, c in cuts.boundaries(positions))
    count = len(stages)
    workload = WorkloadSpec("toy.py", arguments={}, hooks={}, inputs=(), seed=0)
    return Plan(
        graph.digest, workload, count, tuple(stages), boundaries, (), "1f1b", {},
        2 * count, count, 2, Prediction(0.0, 0.0, 0.0, 0.0),
    )  # fmt: skip


def starts(plan: Plan) -> list[int]:
    return [stage.start for stage in plan.stages]


def test_equal_calls_are_cut_at_equal_positions() -> None:
    graph = graph_of(["lin.w", "act", "lin.v", "loss"])
    other = replace(graph, name="other")
    results = map_cuts_to(plan_of(graph, 2), graph, other)
    assert starts(results) == [0, 2]
    assert results.graph_digest == other.digest
    assert results.stages[0].parameters == ("w",)


def test_more_iterations_of_a_loop_move_the_cut_with_the_parameters() -> None:
    graph = graph_of(["lin.w", "pool", "lin.v", "pool", "head.u", "loss"])
    other = graph_of(["lin.w", "pool", "pool", "pool", "lin.v", "pool", "pool", "head.u", "loss"])
    results = map_cuts_to(plan_of(graph, 2, 4), graph, other)
    assert [other.nodes[start].target for start in starts(results)] == ["lin", "lin", "head"]
    assert [boundary.value for boundary in results.boundaries] == ["pool_3", "pool_6"]


def test_a_stage_gets_only_its_own_parameters() -> None:
    graph = graph_of(["lin.w", "lin.v", "loss"])
    other = graph_of(["lin.w", "lin.v", "lin.w", "loss"])
    with pytest.raises(PlanError, match="cannot be cut so that every stage needs only what it has"):
        map_cuts_to(plan_of(graph, 1), graph, other)


def test_values_cross_only_boundaries_of_the_plan() -> None:
    graph = graph_of(["lin.w", "lin.v", "head.u", "loss"])
    skipping = replace(graph.nodes[3], inputs=("head_2", "lin_0"))
    other = replace(graph, nodes=(*graph.nodes[:3], skipping))
    with pytest.raises(PlanError, match="sends values between stages that the plan does not connect"):
        map_cuts_to(plan_of(graph, 1, 2), graph, other)


@pytest.mark.parametrize(
    ("calls", "home", "owner"),
    [
        (["new.u", "lin.w", "act", "lin.v", "loss"], "lin_0", 0),
        (["lin.w", "act", "new.u", "lin.v", "loss"], "lin_2", 1),
        (["lin.w", "act", "lin.v", "loss", "new.u"], "loss_3", 1),
    ],
)
def test_state_of_another_recording_is_assigned_to_the_stage_that_needs_it(
    calls: list[str], home: str, owner: int
) -> None:
    other = graph_of(calls)
    graph = replace(graph_of(["lin.w", "act", "lin.v", "loss"]), parameters=other.parameters)
    assert unused_state(graph) == {"u": 3}  # by default it belongs to the last stage
    assert homes(graph, other) == {"u": home}
    kept = replace(graph, homes=homes(graph, other))
    assert kept.digest == graph.digest
    owned = [parameters for parameters, _ in state_of_stages(kept, Cuts(kept), [2])]
    assert ["u" in parameters for parameters in owned] == [owner == 0, owner == 1]
    plan = plan_of(kept, 2)
    stages = tuple(replace(stage, parameters=owned[stage.index]) for stage in plan.stages)
    results = map_cuts_to(replace(plan, stages=stages), kept, other)
    first = next(index for index, node in enumerate(other.nodes) if "u" in node.parameters)
    assert (first < starts(results)[1]) == (owner == 0)


def test_an_unknown_home_is_refused() -> None:
    graph = graph_of(["lin.w", "loss"])
    for wrong in ({"w": "gone"}, {"gone": "lin_0"}):
        with pytest.raises(ValueError, match="is assigned to the stage of"):
            replace(graph, homes=wrong)


def test_unused_state_beside_an_input_only_node_belongs_to_the_next_computation() -> None:
    graph = graph_of(["lin.w", "mask", "act", "loss"])
    mask = replace(graph.nodes[1], inputs=("x",), input_only=True)
    act = replace(graph.nodes[2], inputs=("lin_0",))
    graph = replace(
        graph, nodes=(graph.nodes[0], mask, act, graph.nodes[3]), parameters=graph_of(["a.w", "a.u"]).parameters
    )
    assert unused_state(graph) == {"u": 3}
    assert unused_state(replace(graph, homes={"u": "mask_1"})) == {"u": 2}


def test_state_of_an_input_only_node_must_be_in_each_stage_that_runs_it() -> None:
    graph = graph_of(["mask.u", "lin.w", "lin.v", "loss"])
    mask = replace(graph.nodes[0], input_only=True)
    first = replace(graph.nodes[1], inputs=("x", "mask_0"))
    nodes = (mask, first, *graph.nodes[2:])
    graph = replace(graph, nodes=nodes)
    plan = plan_of(graph, 2)
    assert starts(map_cuts_to(plan, graph, graph)) == [0, 2]
    both = replace(nodes[2], inputs=("lin_1", "mask_0"))
    with pytest.raises(PlanError, match="reads u in stage 1, which does not have it"):
        map_cuts_to(plan, graph, replace(graph, nodes=(mask, first, both, nodes[3])))

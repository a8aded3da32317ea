"""Messages between stages: values, gradients, ties, loans, and their channels."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph, Input, Node, Symbol
from autopipe.ir.messages import (
    ACTIVATION,
    BUCKET_BYTES,
    GRADIENT,
    LOAN,
    LOSS,
    TIE_GRADIENT,
    TIE_VALUE,
    Channel,
    Loan,
    MessagePlan,
    borrowed,
    chains,
    channels,
    num_buckets,
    tied,
)
from autopipe.ir.plan import Boundary, Plan, Prediction, Stage, Tie
from autopipe.ir.plan_fits_graph import refuse_disagreement
from autopipe.ir.profile import WorkloadSpec
from autopipe.ir.schedule import ScheduleSpec
from autopipe.ir.tensor import TensorSpec

BATCH = TensorSpec(("s0", 4), "float32")
VALUE = TensorSpec(("s0", 4), "float32", requires_grad=True)
WEIGHT = TensorSpec((4,), "float32", requires_grad=True)


def call(name: str, *inputs: str, parameters: tuple[str, ...] = (), spec: TensorSpec | None = VALUE) -> Node:
    return Node(name, "call_function", "f", inputs, spec, parameters=parameters)


# three stages: the second compares ``a`` without a gradient, the first and third share ``w``
GRAPH = Graph(
    "toy",
    (Input("x", BATCH),),
    (Symbol("s0", "x", 0, 2),),
    (
        call("a", "x", parameters=("w",)),
        call("mask", "a", spec=TensorSpec(("s0", 4), "bool")),
        call("b", "mask", parameters=("b.w",)),
        call("c", "a", "b", parameters=("w", "teacher")),
        call("loss", "c"),
    ),
    ("loss",),
    {"w": WEIGHT, "b.w": WEIGHT, "teacher": dataclasses.replace(WEIGHT, requires_grad=False)},
    {},
    {},
    after_step={"teacher": ("b.w",)},
)


def plan_of(
    graph: Graph = GRAPH, *, exact: bool = True, ranks: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,))
) -> Plan:
    cuts = Cuts(graph)
    edges = (0, 1, 3, 5)
    parameters = (("w",), ("b.w",), ("w", "teacher"))
    stages = tuple(
        Stage(
            index, start, stop, graph.nodes[start].name, graph.nodes[stop - 1].name, ranks[index], parameters[index],
            0.0, 0.0, 0,
        )
        for index, (start, stop) in enumerate(itertools.pairwise(edges))
    )  # fmt: skip
    boundaries = tuple(Boundary(v, p, c, cuts.spec(v), 0) for v, p, c in cuts.boundaries(edges[1:3]))
    return Plan(
        graph_digest=graph.digest,
        workload=WorkloadSpec("toy.py", arguments={}, hooks={}, inputs=(), seed=0),
        num_ranks=max(max(group) for group in ranks) + 1,
        stages=stages,
        boundaries=boundaries,
        ties=(Tie("w", 0, (2,), exact),),
        schedule="1f1b",
        schedule_options={},
        batch_size=8,
        num_microbatches=4,
        microbatch_size=2,
        predicted=Prediction(0.0, 0.0, 0.0, 0.0),
    )


def test_a_gradient_skips_stages_that_do_not_differentiate_the_value() -> None:
    plan = plan_of()
    assert [(b.value, b.producer, b.consumers) for b in plan.boundaries] == [("a", 0, (1, 2)), ("b", 1, (2,))]
    assert chains(GRAPH, plan) == {"a": (0, 2), "b": (1, 2)}


def test_a_value_that_no_stage_differentiates_has_no_chain() -> None:
    nodes = list(GRAPH.nodes)
    nodes[3] = dataclasses.replace(nodes[3], spec=BATCH)
    graph = dataclasses.replace(GRAPH, nodes=tuple(nodes))
    assert chains(graph, plan_of(graph)) == {}


def test_a_boundary_without_a_gradient_has_no_chain() -> None:
    plan = plan_of()
    boundaries = (dataclasses.replace(plan.boundaries[0], spec=BATCH), plan.boundaries[1])
    assert chains(GRAPH, dataclasses.replace(plan, boundaries=boundaries)) == {"b": (1, 2)}


def test_the_loss_of_an_earlier_stage_returns_its_gradient_from_the_last() -> None:
    graph = dataclasses.replace(GRAPH, outputs=("a",))
    assert chains(graph, plan_of(graph))["a"] == (0, 2)


def test_values_go_forward_and_gradients_and_exact_ties_return_along_chains() -> None:
    plan = MessagePlan.of(plan_of(), GRAPH)
    assert plan.forward == {(0, 1): ("a",), (0, 2): ("a",), (1, 2): ("b",)}
    assert plan.backward == {(2, 0): ("a", tied("w")), (2, 1): ("b",)}
    assert (plan.edges.forward, plan.edges.backward) == (((0, 1), (0, 2), (1, 2)), ((2, 0), (2, 1)))
    assert MessagePlan.of(plan_of(exact=False), GRAPH).backward == {(2, 0): ("a",), (2, 1): ("b",)}


def test_a_value_without_a_gradient_is_only_sent_forward() -> None:
    plan = plan_of(exact=False)
    boundaries = (dataclasses.replace(plan.boundaries[0], spec=BATCH), plan.boundaries[1])
    messages = MessagePlan.of(dataclasses.replace(plan, boundaries=boundaries), GRAPH)
    assert messages.forward == {(0, 1): ("a",), (0, 2): ("a",), (1, 2): ("b",)}
    assert messages.backward == {(2, 1): ("b",)}


def test_a_plan_with_a_tie_agrees_with_its_graph() -> None:
    refuse_disagreement(plan_of(), GRAPH)


def test_parameters_of_other_stages_are_lent_to_the_after_step_hook() -> None:
    assert borrowed(plan_of(), GRAPH) == {"teacher": ("b.w",)}
    assert MessagePlan.of(plan_of(), GRAPH).loans == (Loan("b.w", 1, 2),)


def test_a_run_has_a_channel_for_every_message() -> None:
    plan = plan_of(exact=False, ranks=((0,), (1,), (2, 3)))
    messages = MessagePlan.of(plan, GRAPH)
    spec = ScheduleSpec(tuple(stage.ranks for stage in plan.stages), 4)
    used = channels(messages, spec)
    assert used == sorted(used) and len(set(used)) == len(used)
    assert all(channel.from_rank != channel.to_rank for channel in used)
    by_kind = {kind: [c for c in used if c.kind == kind] for kind in {c.kind for c in used}}
    assert {(c.from_rank, c.to_rank) for c in by_kind[ACTIVATION]} == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)}
    assert {(c.from_rank, c.to_rank) for c in by_kind[GRADIENT]} == {(2, 0), (3, 0), (2, 1), (3, 1)}
    assert {(c.from_rank, c.to_rank) for c in by_kind[TIE_VALUE]} == {(0, 2), (0, 3)}
    assert {(c.from_rank, c.to_rank) for c in by_kind[TIE_GRADIENT]} == {(2, 0)}
    assert {(c.from_rank, c.to_rank) for c in by_kind[LOAN]} == {(1, 2), (1, 3)}
    assert {(c.from_rank, c.to_rank) for c in by_kind[LOSS]} == {(2, 0), (3, 0)}
    assert {(c.from_rank, c.to_rank) for c in by_kind["batch"]} == {(0, 1), (0, 2), (0, 3)}


def test_a_channel_names_its_stages_and_ranks() -> None:
    assert str(Channel(GRADIENT, 2, 1, 5, 3)) == "gradient of stage 2 (rank 5) to stage 1 (rank 3)"


@pytest.mark.parametrize(("size", "count"), [(0, 1), (BUCKET_BYTES, 1), (BUCKET_BYTES + 1, 2)])
def test_gradients_are_reduced_in_whole_buckets(size: int, count: int) -> None:
    assert num_buckets(size) == count

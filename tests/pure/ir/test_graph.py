"""Graphs: contradictions between nodes, symbols, state and names are refused."""

from __future__ import annotations

import dataclasses

import pytest

from autopipe.ir.graph import Graph, Input, Node, Symbol
from autopipe.ir.tensor import TensorSpec

SPEC = TensorSpec(("s0", 4), "float32", requires_grad=True)
WEIGHT = TensorSpec((4,), "float32", requires_grad=True)


def call(name: str, *inputs: str, **fields: object) -> Node:
    return Node(name, "call_function", "f", inputs, SPEC, **fields)  # type: ignore[arg-type]


GRAPH = Graph(
    "toy",
    (Input("x", SPEC),),
    (Symbol("s0", "x", 0, 2),),
    (call("a", "x", parameters=("a.w",)), call("loss", "a")),
    ("loss",),
    {"a.w": WEIGHT},
    {"mean": TensorSpec((4,), "float32")},
    {"b.w": "a.w"},
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inputs": GRAPH.inputs * 2}, r"two inputs have the same name; the names are \['x', 'x'\]"),
        ({"nodes": (call("loss", "y"),)}, "node loss reads 'y' before it is made"),
        ({"nodes": (call("loss", "x", after=("y",)),)}, "node loss reads 'y' before it is made"),
        ({"nodes": (call("x", "x"), call("loss", "x"))}, "two values are named 'x'"),
        ({"nodes": (call("loss", "x", parameters=("c.w",)),)}, "node loss names parameter 'c.w', which does not exist"),
        ({"nodes": (call("loss", "x", buffers_written=("var",)),)}, "node loss names buffer 'var', which does not"),
        ({"nodes": (call("loss", "x", mutates=("y",)),)}, "node loss names value 'y', which does not exist"),
        ({"nodes": (call("loss", "x", storage="y"),)}, "node loss names value 'y', which does not exist"),
        ({"aliases": {"b.w": "c.w"}}, "'b.w' is another name of 'c.w', which the model does not have"),
        ({"after_step": {"c.w": ()}}, "after_step changes or reads 'c.w'"),
        ({"after_step": {"a.w": ("c.w",)}}, "after_step changes or reads 'c.w'"),
        ({"homes": {"a.w": "gone"}}, "'a.w' is assigned to the stage of 'gone', and one of the two does not exist"),
        ({"homes": {"c.w": "a"}}, "'c.w' is assigned to the stage of 'a', and one of the two does not exist"),
        ({"outputs": ()}, "the graph has no output: expected the loss"),
        ({"outputs": ("gone",)}, "output 'gone' is not the result of a node"),
        ({"symbols": (Symbol("s0", "y", 0, 2),)}, "symbol 's0' is not a dimension of an input"),
        ({"symbols": (Symbol("s0", "x", 2, 2),)}, "symbol 's0' is not a dimension of an input"),
        ({"symbols": (Symbol("s0", "x", 0, 0),)}, "symbol 's0' is not a dimension of an input"),
        ({"symbols": ()}, "'s0' contains a symbol that is not a size of an input"),
        ({"parameters": {"a.w": TensorSpec(("s0 - 3",), "float32")}}, r"'s0 - 3' is negative with \{'s0': 2\}"),
    ],
)
def test_a_contradiction_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GRAPH, **fields)  # type: ignore[arg-type]


def test_state_of_other_batches_is_assigned_to_a_node() -> None:
    homes = {"mean": "loss", "a.w": "a"}
    assert dataclasses.replace(GRAPH, homes=homes).homes == homes


def test_a_size_may_be_negative_for_other_batches() -> None:
    spec = TensorSpec(("s0 - 1",), "float32")
    assert dataclasses.replace(GRAPH, buffers={"mean": spec}).buffers["mean"] == spec


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "call_nothing"}, "node a: unknown kind 'call_nothing'"),
        (
            {"num_random": -1},
            "random_position and checkpoint must be at least 0, and are -1, 0 and 0",
        ),
        (
            {"random_position": -2},
            "random_position and checkpoint must be at least 0, and are 0, -2 and 0",
        ),
    ],
)
def test_an_invalid_node_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GRAPH.nodes[0], **fields)  # type: ignore[arg-type]


def test_a_symbol_has_a_range() -> None:
    symbol = Symbol("s1", "x", 1, 8, low=4, high=16)
    assert [symbol.holds(size) for size in (3, 4, 16, 17)] == [False, True, True, False]
    assert Symbol("s1", "x", 1, 8).holds(10**6)


def test_the_place_of_a_call_is_the_line_of_the_model_first() -> None:
    node = dataclasses.replace(GRAPH.nodes[0], source="lib.py:7")
    assert node.place == "lib.py:7"
    assert dataclasses.replace(node, own_source="net.py:3").place == "net.py:3 (lib.py:7)"


def test_buffers_that_results_depend_on_are_replayed() -> None:
    nodes = (
        dataclasses.replace(
            call("norm", "x", buffers_written=("mean",)), kind="call_module", module_type="BatchNorm1d"
        ),
        dataclasses.replace(call("functional", "norm", buffers_written=("var",)), target="torch.batch_norm"),
        call("push", "functional", buffers=("queue",), buffers_written=("queue",)),
        dataclasses.replace(call("power", "push", buffers_written=("u",)), kind="call_module", module_type="Spectral"),
        call("read", "power", buffers=("table",)),
        call("loss", "read"),
    )
    state = {name: TensorSpec((4,), "float32") for name in ("mean", "var", "queue", "u", "table")}
    graph = dataclasses.replace(GRAPH, nodes=nodes, buffers=state, parameters={}, aliases={})
    assert graph.replayed_buffers == {"queue", "u"}
    reader = call("reader", "read", buffers=("mean",))
    read_again = dataclasses.replace(graph, nodes=(*nodes[:-1], reader, call("loss", "reader")))
    assert read_again.replayed_buffers == {"queue", "u", "mean"}

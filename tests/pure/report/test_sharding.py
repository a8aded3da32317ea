"""The line and the document on what a team could shard."""

import dataclasses

from autopipe.ir.graph import Graph, Input, Node, Symbol
from autopipe.ir.teams.axes import ADDED, LOOKED_UP, Axis, Place, Segment, Sum
from autopipe.ir.tensor import TensorSpec
from autopipe.report import profiles


def graph_of(blocks: int, size: int = 8) -> Graph:
    """Return a graph of blocks with two matrices each, a norm, and an axis of ``size`` in each block."""
    spec = TensorSpec(("s0", 4), "float32", requires_grad=True)
    nodes, axes, parameters = [], [], {}
    for i in range(blocks):
        up, down = f"blocks.{i}.up", f"blocks.{i}.down"
        before = nodes[-1].name if nodes else "x"
        nodes.append(Node(f"u{i}", "call_function", "linear", (before,), spec, parameters=(up,)))
        nodes.append(Node(f"d{i}", "call_function", "linear", (f"u{i}",), spec, parameters=(down,)))
        parameters |= {up: TensorSpec((size, 4), "float32"), down: TensorSpec((4, size), "float32")}
        places = Place(up, 0, (Segment(0, 1),)), Place(down, 1, (Segment(0, 1),))
        sums = (Sum(f"d{i}", ADDED),)
        axes.append(Axis(f"blocks.{i}/{size}", size, places, sums=sums, nodes=(f"u{i}", f"d{i}")))
    nodes.append(Node("norm", "call_function", "norm", (nodes[-1].name,), spec, parameters=("norm",)))
    parameters["norm"] = TensorSpec((4,), "float32")
    batch, symbol = Input("x", TensorSpec(("s0", 4), "float32")), Symbol("s0", "x", 0, 2)
    whole = (("norm", "normalized over"),)
    return Graph("toy", (batch,), (symbol,), tuple(nodes), ("norm",), parameters, {}, {}, axes=tuple(axes), whole=whole)


def test_equal_blocks_are_one_entry():
    assert profiles.sharding_line(graph_of(3)) == (
        "tensor parallelism: 98.0% of the parameters can be sharded over 2 processes, along 3 axes: blocks.*/8 x 3\n"
        "  whole: 2.0% normalized over"
    )


def test_a_model_with_nothing_to_shard_says_so_in_one_line():
    graph = dataclasses.replace(graph_of(1), axes=(), whole=(("norm", "normalized over"), ("blocks.0.up", "why")))
    line = profiles.sharding_line(graph)
    assert line.startswith("tensor parallelism: no parameter can be sharded over 2 processes (")
    assert "\n" not in line


def test_a_size_that_two_does_not_divide_is_the_reason():
    assert "whole" not in profiles.sharding_line(graph_of(1))[:60]
    line = profiles.sharding_line(graph_of(1, size=9))
    assert "94.7% a size of 9, which 2 does not divide" in line


def test_a_vocabulary_is_shown_with_its_padding():
    graph = graph_of(2, size=9)
    sums = [dataclasses.replace(axis, sums=(Sum(axis.sums[0].node, LOOKED_UP),)) for axis in graph.axes]
    graph = dataclasses.replace(graph, axes=tuple(sums))
    assert "along 2 axes: blocks.*/9 (padded to 10) x 2\n" in profiles.sharding_line(graph)
    assert [axis["padding"] for axis in profiles.sharding_fields(graph)["axes"]] == [1, 1]
    assert [axis["padding"] for axis in profiles.sharding_fields(graph_of(1))["axes"]] == [0]


def test_the_document_has_every_axis_and_shares_that_add_up():
    document = profiles.sharding_fields(graph_of(2))
    assert [axis["name"] for axis in document["axes"]] == ["blocks.0/8", "blocks.1/8"]
    assert document["axes"][0]["parameters"] == ["blocks.0.up", "blocks.0.down"]
    assert document["share"] + sum(document["whole"].values()) == 1

"""Legal cuts, and the values that cross them."""

import dataclasses

import pytest

from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph, Input, Node, Symbol
from autopipe.ir.tensor import TensorSpec


def graph_of(storage: str) -> Graph:
    """Return the graph x -> a -> b, in which c reads a and b. ``storage``: the value whose memory b shares."""
    spec = TensorSpec(("s0", 4), "float32", requires_grad=True)

    def node(name: str, *inputs: str, storage: str = "") -> Node:
        return Node(name, "call_function", "f", inputs, spec, parameters=(f"{name}.w",), storage=storage)

    nodes = (node("a", "x"), node("b", "a", storage=storage), node("c", "a", "b"), node("loss", "c"))
    parameters = {f"{n.name}.w": TensorSpec((4,), "float32", requires_grad=True) for n in nodes}
    batch, symbol = Input("x", TensorSpec(("s0", 4), "float32")), Symbol("s0", "x", 0, 2)
    return Graph("toy", (batch,), (symbol,), nodes, ("loss",), parameters, {}, {})


def test_two_tensors_may_cross_together():
    assert Cuts(graph_of("")).legal == (1, 2, 3)


def test_one_tensor_with_two_names_does_not_cross():
    # plain autograd sums the gradients of its readers in one order, two chains in another
    assert Cuts(graph_of("a")).legal == (1, 3)


def test_a_graph_without_work_has_no_cut():
    graph = graph_of("")
    free = tuple(dataclasses.replace(node, input_only=True, parameters=()) for node in graph.nodes)
    assert Cuts(dataclasses.replace(graph, nodes=free, parameters={})).legal == ()


def test_a_view_of_a_view_belongs_to_the_first_value():
    graph = graph_of("a")
    nodes = list(graph.nodes)
    nodes[2] = dataclasses.replace(nodes[2], storage="b")
    cuts = Cuts(dataclasses.replace(graph, nodes=tuple(nodes)))
    assert [cuts.storage(value) for value in ("c", "b", "a", "x")] == ["a", "a", "a", "x"]


def test_a_value_that_is_not_one_tensor_cannot_cross():
    graph = graph_of("")
    nodes = list(graph.nodes)
    nodes[1] = dataclasses.replace(nodes[1], spec=None)
    cuts = Cuts(dataclasses.replace(graph, nodes=tuple(nodes)))
    assert cuts.legal == (1, 3)
    with pytest.raises(ValueError, match="b is not one tensor"):
        cuts.spec("b")


def test_a_change_in_place_forbids_cuts_between_a_value_and_its_change():
    graph = graph_of("")
    nodes = list(graph.nodes)
    nodes[2] = dataclasses.replace(nodes[2], mutates=("a",))
    assert Cuts(dataclasses.replace(graph, nodes=tuple(nodes))).legal == (3,)
    # the batch, and values that every stage computes for itself, may be changed on either side
    nodes[2] = dataclasses.replace(graph.nodes[2], mutates=("x",))
    assert Cuts(dataclasses.replace(graph, nodes=tuple(nodes))).legal == (1, 2, 3)


def test_users_of_a_written_buffer_are_not_separated():
    graph = graph_of("")
    nodes = list(graph.nodes)
    nodes[0] = dataclasses.replace(nodes[0], buffers_written=("mean",))
    nodes[2] = dataclasses.replace(nodes[2], buffers=("mean",))
    state = {"mean": TensorSpec((4,), "float32")}
    assert Cuts(dataclasses.replace(graph, nodes=tuple(nodes), buffers=state)).legal == (3,)


def test_an_output_of_an_earlier_stage_crosses_to_the_last():
    graph = dataclasses.replace(graph_of(""), outputs=("loss", "a"))
    assert Cuts(graph).boundaries((1, 3)) == [("a", 0, (1, 2)), ("c", 1, (2,))]
    assert Cuts(graph).crossing_bytes(1, 3) == 3 * 4 * 4

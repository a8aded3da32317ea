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

"""Converts a profile in PipeDream's format to a ``Profile``, for plans with autopipe's own cost model."""

from __future__ import annotations

from pathlib import Path

from autopipe.ir.graph import Graph, Input, Node, Symbol
from autopipe.ir.profile import Device, Measurement, NodeCost, Profile, WorkloadSpec
from autopipe.ir.tensor import TensorSpec
from benchmarks.pipedream.file_format import read_pipedream
from benchmarks.pipedream.states import Dag


def profile_from_pipedream(path: Path) -> Profile:
    """Return the profile of a ``graph.txt``. Its minibatch is treated as one microbatch of one sample.

    Layers are in a linear order, branch by branch. The format has no more information, so every tensor is float32,
    every cut is legal, and each layer keeps its output for its backward.

    Raises: PlanError with file and line if the file violates the format.
    """
    layers = read_pipedream(path)
    dag = Dag(layers)
    nodes, costs, parameters = [], {}, {}
    batch = "batch"
    while batch in layers.names:
        batch += "_"
    for layer in dag.order(deep=True):
        own = layers.names[layer]
        size = int(layers.activation_bytes[layer])
        sources = tuple(layers.names[other] for other in dag.before[layer]) or (batch,)
        weight = int(layers.parameter_bytes[layer]) // 4
        if weight:
            parameters[f"{own}.weight"] = TensorSpec((weight,), "float32", True)
        nodes.append(
            Node(
                name=own,
                kind="call_module",
                target=layers.descriptions[layer],
                inputs=sources,
                spec=TensorSpec(("s0", max(1, size // 4)), "float32", True),
                parameters=(f"{own}.weight",) if weight else (),
            )
        )
        costs[own] = NodeCost(layers.forward_seconds[layer], layers.backward_seconds[layer], size, size)
    ends = tuple(node.name for node in nodes if not dag.after[layers.names.index(node.name)])
    graph = Graph(
        name=path.name,
        inputs=(Input(batch, TensorSpec(("s0",), "float32")),),
        symbols=(Symbol("s0", batch, 0, 1),),
        nodes=tuple(nodes),
        outputs=ends,
        parameters=parameters,
        buffers={},
        aliases={},
    )
    device = Device("gpu", "as in the file", 0)
    measurement = Measurement(1, costs, keepers={own: own for own in costs})
    return Profile(WorkloadSpec(path.name, arguments={}, hooks={}, inputs=(), seed=0), graph, device, (measurement,))

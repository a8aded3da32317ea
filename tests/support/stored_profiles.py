"""A profile, for commands that plan without measuring."""

from __future__ import annotations

from autopipe.ir.graph import Graph, Input, Node, Symbol
from autopipe.ir.profile import Device, Measurement, NodeCost, Profile, WorkloadSpec
from autopipe.ir.tensor import TensorSpec

MIB = 2**20


LAYERS = 8


HERE = ("--gpu-memory", "8GiB", "--link", "10GB/s")


def stored_profile():
    """Return a profile of eight equal layers, 10 ms forward and 20 ms backward per sample, of a missing model file."""
    names = [f"layer{k}" for k in range(LAYERS)]
    nodes = tuple(
        Node(
            name,
            "call_function",
            "f",
            (names[k - 1],) if k else ("x",),
            TensorSpec(("s0", 1024), "float32", True),
            parameters=(f"{name}.weight",),
        )
        for k, name in enumerate(names)
    )
    weights = {f"{name}.weight": TensorSpec((MIB // 4,), "float32", True) for name in names}
    symbols = (Symbol("s0", "x", 0, 2),)
    graph = Graph(
        "gone.py", (Input("x", TensorSpec(("s0",), "float32")),), symbols, nodes, (names[-1],), weights, {}, {}
    )
    costs = {b: {name: NodeCost(0.01 * b, 0.02 * b, 4096 * b, MIB * b) for name in names} for b in (1, 2, 4)}
    measured = tuple(Measurement(b, costs[b]) for b in costs)
    device = Device("cuda", "NVIDIA A100-SXM4-80GB", 80 * 10**9)
    return Profile(
        WorkloadSpec("gone.py", arguments={}, hooks={}, inputs=(), seed=0), graph, device, measured, batch_size=16
    )

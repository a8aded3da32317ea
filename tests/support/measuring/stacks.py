"""A stack of blocks, captured without the recorder, for the tests of measurement."""

from __future__ import annotations

import operator
import types

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from autopipe.ir.graph import Graph, Input, Node
from autopipe.ir.profile import WorkloadSpec
from autopipe.ir.tensor import TensorSpec

SPEC = WorkloadSpec("net.py", arguments={}, hooks={}, inputs=(), seed=0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """A stack with its loss, as the recorder would see it."""

    def __init__(self, blocks=3, width=8):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.batch_norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 2)

    def forward(self, x, target):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (self.head(self.batch_norm(x)) - target).square().mean()


def spec_of(value):
    if not isinstance(value, torch.Tensor):
        return None
    return TensorSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."), value.requires_grad)


def captured(model, **inputs):
    """Capture with torch's symbolic tracer, which suffices for simple models."""
    module = fx.symbolic_trace(model)
    ShapeProp(module).propagate(*inputs.values())
    names = list(inputs)
    nodes = []
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        reads = tuple(dict.fromkeys(n.name for n in node.all_input_nodes if n.op != "get_attr"))
        path = str(node.target) if node.op == "call_module" else ""
        stack = node.meta.get("nn_module_stack")
        if stack:
            path = list(stack)[-1]
        in_place = node.op == "call_method" and str(node.target).endswith("_")
        meta = node.meta.get("tensor_meta")
        spec = None if meta is None or node.meta["type"] is not torch.Tensor else TensorSpec((), "float32", True)
        mutates = (node.args[0].name,) if in_place else ()
        if node.op == "call_module" and getattr(module.get_submodule(node.target), "inplace", False):
            mutates = (node.args[0].name,)
        nodes.append(
            Node(
                node.name, node.op, str(node.target), reads, spec, module_path=path, mutates=mutates,
                storage=mutates[0] if mutates else "", glued=node.target is operator.getitem, source="net.py:7",
            )
        )  # fmt: skip
    outputs = tuple(n.name for n in next(n for n in module.graph.nodes if n.op == "output").all_input_nodes)
    graph = Graph(
        "net", tuple(Input(name, spec_of(inputs[name])) for name in names), (), tuple(nodes), outputs,
        {name: spec_of(p) for name, p in model.named_parameters()},
        {name: spec_of(b) for name, b in model.named_buffers()}, {},
    )  # fmt: skip
    return types.SimpleNamespace(graph=graph, module=module)


class Workload:
    """A workload with random inputs of the given shapes."""

    spec = SPEC

    def __init__(self, make=torch.optim.AdamW, **shapes):
        self.make, self.shapes = make, shapes

    def example_item(self, batch_size):
        generator = torch.Generator().manual_seed(0)
        return {k: torch.randn((batch_size, *v), generator=generator) for k, v in self.shapes.items()}

    def leaves(self, item):
        return item

    def optimizer(self, named):
        trained = [(name, p) for name, p in named if p.requires_grad]
        return self.make(trained) if trained else None


def stack_of(blocks=3, width=8):
    model = Stack(blocks, width)
    workload = Workload(x=(4,), target=(2,))
    return model, captured(model, **workload.example_item(5)), workload

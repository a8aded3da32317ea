"""Build a ``GraphModule`` from a recorded graph, or run a graph node by node.

It runs with the grad mode, autocast and random draws of the forward.
"""

from __future__ import annotations

import contextlib
import keyword
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopipe import draws
from autopipe.devices import arguments_on, autocast_on
from autopipe.errors import TraceError

CPU = torch.device("cpu")


@contextlib.contextmanager
def context_of(meta: Mapping[str, Any], device: torch.device = CPU) -> Iterator[None]:
    """Enter the grad mode and the autocast regions in which a node was recorded."""
    with contextlib.ExitStack() as stack:
        if not meta.get("grad", True):
            stack.enter_context(torch.no_grad())
        for kind, dtype, enabled, cache in autocast_on(device, meta):
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
        yield


Drawing = Callable[[tuple[int, int, int], int, int], contextlib.AbstractContextManager[None]]
"""Seeds a call that draws: of (run seed, minibatch, microbatch), the position of its first draw, and their number."""


class Replay(fx.Interpreter):
    """Runs the graph on real tensors. ``where``: (run seed, minibatch, microbatch), which seed the random draws."""

    def __init__(
        self,
        module: fx.GraphModule,
        where: tuple[int, int, int],
        drawing: Drawing = draws.at,
        device: torch.device = CPU,
    ) -> None:
        super().__init__(module)
        self.where, self.drawing, self.device = where, drawing, device

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[Any, Any]:
        """Return the arguments of a node, on the device that computes."""
        return arguments_on(self.device, *super().fetch_args_kwargs_from_env(n))

    def run_node(self, n: fx.Node) -> Any:
        """Run one node in its context."""
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        position, count = n.meta.get("random", (0, 0))
        with contextlib.ExitStack() as stack:
            if not n.meta.get("grad", True) or n.meta.get("autocast"):
                stack.enter_context(context_of(n.meta, self.device))
            if n.meta.get("opaque"):
                stack.enter_context(draws.inside(self.where, position))
            elif count:
                stack.enter_context(self.drawing(self.where, position, count))
            return super().run_node(n)


def replay(
    module: fx.GraphModule, leaves: Mapping[str, Tensor], where: tuple[int, int, int], drawing: Drawing = draws.at
) -> tuple[Tensor, ...]:
    """Return the outputs of the graph for a batch: the loss, and its weight if it has one.

    It computes on the device of the batch, where what the module reads must be.
    """
    inputs = [leaves[node.name] for node in module.graph.nodes if node.op == "placeholder"]
    device = inputs[0].device if inputs else CPU
    outputs: tuple[Tensor, ...] = Replay(module, where, drawing, device).run(*inputs)
    return outputs


def assemble(model: nn.Module, graph: fx.Graph, constants: Mapping[str, Tensor]) -> fx.GraphModule:
    """Return the graph as a module. Nothing is copied: the parameters are the model's, under their original names.

    Raises: TraceError if an argument of a call cannot be written as source text.
    """
    module = fx.GraphModule(nn.Module(), fx.Graph(), class_name=type(model).__name__)
    for node in graph.nodes:
        target = str(node.target)
        if node.op == "get_attr" and target in constants:
            setattr(module, target, constants[target])
        elif node.op == "get_attr":
            _install_tensor(module, model, target)
        elif node.op == "call_module":
            parent, _, name = target.rpartition(".")
            _container(module, model, parent).add_module(name, model.get_submodule(target))
    try:
        module.graph = graph
    except (SyntaxError, RuntimeError) as error:
        if not any(keyword.iskeyword(name) for node in graph.nodes for name in str(node.target).split(".")):
            raise TraceError(f"a call has an argument that cannot be written as source text: {error}") from error
        _run_without_source(module, graph)
    # not train(), which would change the user's modules
    module.training = any(part.training for part in model.modules())
    return module


def _run_without_source(module: fx.GraphModule, graph: fx.Graph) -> None:
    """Set the graph of a module that torch.fx cannot write as source: a part is named like a Python keyword.

    Stage files access such a part as ``self["class"]``.
    """
    module._graph = graph
    graph.owning_module = module
    type(module).forward = lambda self, *args: fx.Interpreter(self).run(*args)


def _container(module: nn.Module, model: nn.Module, path: str) -> nn.Module:
    """Return the module at ``path``, and create empty containers along the path."""
    for name in path.split(".") if path else ():
        child = module._modules.get(name)
        if child is None:
            child = nn.Module()
            module.add_module(name, child)
        module = child
    return module


def _install_tensor(module: nn.Module, model: nn.Module, target: str) -> None:
    path, _, name = target.rpartition(".")
    owner = model.get_submodule(path)
    place = _container(module, model, path)
    if place is owner:
        return
    if name in owner._parameters:
        place.register_parameter(name, owner._parameters[name])
    else:
        place.register_buffer(name, owner._buffers[name], persistent=name not in owner._non_persistent_buffers_set)

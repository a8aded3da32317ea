"""Build a ``GraphModule`` from the recorded graph, with the user's own modules and tensors."""

from __future__ import annotations

import keyword
from collections.abc import Mapping

from torch import Tensor, fx, nn

from autopipe.errors import TraceError


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

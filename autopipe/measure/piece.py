"""A run of graph nodes as something to call, on copies of the state it uses.

``State`` holds the copies on the device to measure on: the user's parameters, buffers and their ``.grad`` are never
touched, and a model that is larger than the device can be measured run by run, as only one run's state is there at a
time. A parameter without data (a model on ``meta``) gets random values.

``Piece`` is one run as a compiled ``GraphModule``, so that calling it costs no more than a stage's own source does.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopipe import sparse


class State:
    """Copies of parameters, buffers, constants and modules, made when first asked for. Ties stay ties."""

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self._root = root
        self._device = device
        self._memo: dict[int, Any] = {}
        self._kept: list[Any] = []  # an id is only good while its object lives

    def attribute(self, path: str) -> Any:
        """Return the copy of what a ``get_attr`` or ``call_module`` node names."""
        found: Any = self._root
        for part in path.split("."):
            found = getattr(found, part)
        if isinstance(found, Tensor):
            return self._tensor(found)
        return self._module(found) if isinstance(found, nn.Module) else found

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The copies of parameters made so far."""
        return [value for value in self._memo.values() if isinstance(value, nn.Parameter)]

    def storages(self) -> set[int]:
        """The memory of all that is copied, as ``storage_of`` names it."""
        return {storage_of(value) for value in self._memo.values() if isinstance(value, Tensor)}

    def _tensor(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._memo:
            made: Tensor
            if tensor.is_meta:
                made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device)
                if tensor.is_floating_point():
                    made.normal_(std=0.02)
            else:
                made = tensor.detach().to(self._device, copy=True)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            self._memo[id(tensor)] = made
            self._kept.append(tensor)
        found: Tensor = self._memo[id(tensor)]
        return found

    def _module(self, module: nn.Module) -> nn.Module:
        if id(module) not in self._memo:
            for tensor in (*module.parameters(), *module.buffers()):
                self._tensor(tensor)
            made = copy.deepcopy(module, self._memo)
            for part in made.modules():
                for name, value in list(vars(part).items()):
                    if isinstance(value, Tensor) and value.device != self._device:
                        setattr(part, name, value.to(self._device))
                if isinstance(part, nn.RNNBase):
                    part.flatten_parameters()
            self._kept.append(module)
        found: nn.Module = self._memo[id(module)]
        return found


class Piece:
    """Consecutive nodes as one function of the values that they read and do not make."""

    def __init__(self, nodes: Sequence[fx.Node], inputs: Sequence[str], outputs: Sequence[str], state: State) -> None:
        self.inputs, self.outputs, self.state = tuple(inputs), tuple(outputs), state
        graph = fx.Graph()
        made: dict[str, fx.Node] = {name: graph.placeholder(name) for name in inputs}
        attributes: dict[str, Any] = {}
        region = Region(graph)

        def argument(node: fx.Node) -> fx.Node:
            if node.op == "get_attr" and node.name not in made:
                attributes[_attribute(node)] = state.attribute(str(node.target))
                made[node.name] = graph.get_attr(_attribute(node))
            return made[node.name]

        for node in nodes:
            if node.op == "call_module":
                attributes[_attribute(node)] = state.attribute(str(node.target))
            arguments = fx.node.map_arg(node.args, argument), fx.node.map_arg(node.kwargs, argument)
            region.enter(node)
            target = _attribute(node) if node.op == "call_module" else _callable(node.target)
            made[node.name] = graph.create_node(node.op, target, *arguments, name=node.name)
        region.leave()
        graph.output(tuple(made[name] for name in outputs))
        self.module = fx.GraphModule(attributes, graph)

    def __call__(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Run it on values in the order of ``inputs``; returns those of ``outputs``."""
        found: tuple[Any, ...] = self.module(*values)
        return found


def _attribute(node: fx.Node) -> str:
    """Return the path that a node names, without Python's keywords: torch.fx writes ``self.class`` as it stands."""
    return ".".join(f"{name}_of_the_model" if iskeyword(name) else name for name in str(node.target).split("."))


def _callable(target: Any) -> Any:
    """Return what a call is made to: for a custom ``autograd.Function`` a plain function around its ``apply``.

    ``torch.fx`` writes ``apply`` down as if it were a function of torch itself, which it is not.
    """
    owner = getattr(target, "__self__", None)
    if not (isinstance(owner, type) and issubclass(owner, torch.autograd.Function)):
        return target

    def apply(*args: Any) -> Any:
        return target(*args)

    return apply


class Region:
    """Writes into an fx graph the changes of grad mode and autocast between the nodes of a piece."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._grad = True
        self._autocast: tuple[Any, ...] = ()
        self._open: list[fx.Node] = []

    def enter(self, node: fx.Node) -> None:
        """Open the region of the node that is written next; close what it is not in."""
        self._change(grad_of(node), autocast_of(node))

    def leave(self) -> None:
        """Close everything."""
        self._change(True, ())

    def _change(self, grad: bool, autocast: tuple[Any, ...]) -> None:
        if autocast != self._autocast:
            while self._open:
                self._graph.call_function(torch.amp.autocast_mode._exit_autocast, (self._open.pop(),))
            for entry in autocast:
                self._open.append(self._graph.call_function(torch.amp.autocast_mode._enter_autocast, entry))
            self._autocast = autocast
        if grad != self._grad:
            self._graph.call_function(torch._C._set_grad_enabled, (grad,))
            self._grad = grad


def grad_of(node: fx.Node) -> bool:
    """Whether the node runs with gradients."""
    return bool(node.meta.get("grad", True))


def autocast_of(node: fx.Node) -> tuple[Any, ...]:
    """Return the (device, dtype, enabled, cache) of every autocast region that the node runs in."""
    entries = node.meta.get("autocast") or ()
    return (tuple(entries),) if entries and isinstance(entries[0], str) else tuple(tuple(entry) for entry in entries)


def storage_of(tensor: Tensor) -> int:
    """Name the memory of a tensor, for as long as it is held."""
    return int(sparse.memory_of(tensor)._cdata)


def carrying(value: Any) -> list[Tensor]:
    """Return the tensors of a result from which a backward can start.

    A view of a parameter that was made without gradients says that it requires one, and has no history.
    """
    return [tensor for tensor in tensors_of(value) if tensor.requires_grad and tensor.grad_fn is not None]


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a value, however nested."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]

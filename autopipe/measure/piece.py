"""A segment of graph nodes as a callable, on copies of the state that it uses.

``StateCopies`` holds the copies on the device: the user's parameters, buffers and gradients never change, and a model
that is larger than the device can be measured segment by segment, because only the state of one segment is copied at a
time. A parameter without data (a model on ``meta``) gets random values.

``Piece`` compiles a segment into a ``GraphModule``, so that a call costs no more than in the source of a stage.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopipe import sparse
from autopipe.casts import is_replaceable, replace, shared_cast
from autopipe.devices import arguments_on, autocast_on
from autopipe.draws import seed_recurrent_layers
from autopipe.team import Unplaced

_STAGE = "stage_of_the_team"  # the attribute of a piece


class StateCopies:
    """Copies of parameters, buffers, constants and modules, made on first use. Tied tensors stay tied.

    ``casts``: id of a parameter -> dtype of the cast that takes its place in a stage (``autopipe.casts``).
    """

    def __init__(self, root: nn.Module, device: torch.device, casts: Mapping[int, torch.dtype] | None = None) -> None:
        self._root = root
        self.device = device
        self._dtypes = casts or {}
        self._casts: dict[int, Tensor] = {}  # id of a parameter -> the cast of its copy
        self._memo: dict[int, Any] = {}  # id of an original -> its copy
        self._originals: list[Any] = []  # kept alive, because an id is valid only while its object lives

    def attribute(self, path: str) -> Any:
        """Return the copy of the target of a ``get_attr`` or ``call_module`` node."""
        value: Any = self._root
        for part in path.split("."):
            value = getattr(value, part)
        if isinstance(value, Tensor):
            return self._cast(value) if id(value) in self._dtypes else self._tensor(value)
        return self._module(value) if isinstance(value, nn.Module) else value

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The copies of parameters made so far."""
        return [value for value in self._memo.values() if isinstance(value, nn.Parameter)]

    @property
    def originals(self) -> list[nn.Parameter]:
        """The parameters of the model of which copies were made, in the order of ``parameters``."""
        return [value for value in self._originals if isinstance(value, nn.Parameter)]

    @property
    def replaced(self) -> dict[int, torch.dtype]:
        """Id of a parameter of the model -> dtype, for those whose copies were replaced by casts."""
        return {key: cast.dtype for key, cast in self._casts.items()}

    def renewed(self, *, parameters: bool) -> StateCopies:
        """Return copies with the original buffers, and with the original parameters if ``parameters``.

        Otherwise the copies of the parameters are passed on, without gradients: nothing has changed them, and on a GPU
        another copy would take longer than what is measured.
        """
        other = StateCopies(self._root, self.device, self._dtypes)
        if not parameters:
            other._casts = self._casts
            for original in self._originals:
                copied = self._memo.get(id(original))
                if isinstance(original, nn.Parameter) and isinstance(copied, nn.Parameter):
                    copied.grad = None
                    other._memo[id(original)] = copied
                    other._originals.append(original)
        return other

    def storages(self) -> set[int]:
        """The memory of all copies, as ``storage_of`` identifies it."""
        copies = (*self._memo.values(), *self._casts.values())
        return {storage_of(value) for value in copies if isinstance(value, Tensor)}

    def _tensor(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._memo:
            if tensor.is_meta:
                copied = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.device)
                if tensor.is_floating_point():
                    copied.normal_(std=0.02)
            else:
                copied = tensor.detach().to(self.device, copy=True)
            if isinstance(tensor, nn.Parameter):
                copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
            self._memo[id(tensor)] = copied
            self._originals.append(tensor)
        known: Tensor = self._memo[id(tensor)]
        return known

    def _cast(self, parameter: Tensor) -> Tensor:
        if id(parameter) not in self._casts:
            copied = self._tensor(parameter)
            assert isinstance(copied, nn.Parameter)
            self._casts[id(parameter)] = shared_cast(copied, self._dtypes[id(parameter)])
        return self._casts[id(parameter)]

    def _module(self, module: nn.Module) -> nn.Module:
        if id(module) not in self._memo:
            for tensor in (*module.parameters(), *module.buffers()):
                self._tensor(tensor)
            for part in module.modules():
                for value in vars(part).values():
                    if isinstance(value, Tensor) and not value.is_leaf:  # of a forward: deepcopy would refuse it
                        self._tensor(value)
            copied = copy.deepcopy(module, self._memo)
            for part in copied.modules():
                for name, value in list(vars(part).items()):
                    if isinstance(value, Tensor) and value.device != self.device:
                        setattr(part, name, value.to(self.device))
                if isinstance(part, nn.RNNBase):
                    part.flatten_parameters()
            seed_recurrent_layers(copied, self.device)  # they cost what they cost in a stage
            for original, part in zip(module.modules(), copied.modules(), strict=True):
                for key, parameter in original._parameters.items():
                    if parameter is not None and id(parameter) in self._dtypes and is_replaceable(part):
                        replace(part, key, self._cast(parameter))
            self._originals.append(module)
        known: nn.Module = self._memo[id(module)]
        return known


class Piece:
    """Consecutive nodes as one function of the values that they read and do not compute."""

    def __init__(
        self, nodes: Sequence[fx.Node], inputs: Sequence[str], outputs: Sequence[str], state: StateCopies
    ) -> None:
        self.inputs, self.outputs, self.state = tuple(inputs), tuple(outputs), state
        graph = fx.Graph()
        copies: dict[str, fx.Node] = {name: graph.placeholder(name) for name in inputs}
        attributes: dict[str, Any] = {}
        region = Region(graph, state.device)

        def argument(node: fx.Node) -> fx.Node:
            if node.op == "get_attr" and node.name not in copies:
                attributes[_attribute(node)] = state.attribute(str(node.target))
                copies[node.name] = graph.get_attr(_attribute(node))
            return copies[node.name]

        for node in nodes:
            if node.op == "call_module":
                attributes[_attribute(node)] = state.attribute(str(node.target))
            args, kwargs = arguments_on(state.device, node.args, node.kwargs)
            arguments = fx.node.map_arg(args, argument), fx.node.map_arg(kwargs, argument)
            if args and isinstance(args[0], Unplaced):  # torch.fx would write it as a name
                if _STAGE not in attributes:
                    attributes[_STAGE], stage = args[0], graph.get_attr(_STAGE)
                arguments = (stage, *arguments[0][1:]), arguments[1]
            region.enter(node)
            target = _attribute(node) if node.op == "call_module" else _callable(node.target)
            copies[node.name] = graph.create_node(node.op, target, *arguments, name=node.name)
        region.leave()
        graph.output(tuple(copies[name] for name in outputs))
        self.module = fx.GraphModule(attributes, graph)

    def __call__(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Run the nodes on values in the order of ``inputs``; return the values of ``outputs``."""
        results: tuple[Any, ...] = self.module(*values)
        return results


def _attribute(node: fx.Node) -> str:
    """Return the target path of a node without Python keywords, because torch.fx writes ``self.class`` literally."""
    return ".".join(f"{name}_of_the_model" if iskeyword(name) else name for name in str(node.target).split("."))


def _callable(target: Any) -> Any:
    """Return the target of a call; for a custom ``autograd.Function`` a plain function around its ``apply``.

    ``torch.fx`` would write ``apply`` as if it were a function of torch.
    """
    owner = getattr(target, "__self__", None)
    if not (isinstance(owner, type) and issubclass(owner, torch.autograd.Function)):
        return target

    def apply(*args: Any) -> Any:
        return target(*args)

    return apply


class Region:
    """Writes the changes of grad mode and autocast between the nodes of a piece into an fx graph, for a device."""

    def __init__(self, graph: fx.Graph, device: torch.device) -> None:
        self._graph, self._device = graph, device
        self._grad = True
        self._autocast: tuple[Any, ...] = ()
        self._open: list[fx.Node] = []

    def enter(self, node: fx.Node) -> None:
        """Enter the region of the next node, and leave the regions that it is not in."""
        self._change(grad_of(node), autocast_on(self._device, node.meta))

    def leave(self) -> None:
        """Leave all regions."""
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
    """Return whether a node runs with gradients."""
    return bool(node.meta.get("grad", True))


def storage_of(tensor: Tensor) -> int:
    """Return an identifier of the memory of a tensor, valid while that memory is allocated."""
    return int(sparse.memory_of(tensor)._cdata)


def with_history(value: Any) -> list[Tensor]:
    """Return the tensors of a result from which a backward can start.

    A view of a parameter that was computed without gradients has ``requires_grad`` but no history.
    """
    return [tensor for tensor in tensors_of(value) if tensor.requires_grad and tensor.grad_fn is not None]


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a value, at any depth."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]

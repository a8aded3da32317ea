"""The source node of each tensor: results of calls, the model's own tensors, and constants that the forward uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from autopipe.trace.explain import TRANSFORMED, UNSEEN, unsupported
from autopipe.trace.record.faked_model import FakedModel
from autopipe.trace.record.values import tensors_in


class TensorNodes:
    """Tensors by identity. ``constants``: those that are neither parameters nor buffers, by attribute name."""

    def __init__(self, graph: fx.Graph, faked_model: FakedModel) -> None:
        self.graph, self.faked_model = graph, faked_model
        self.constants: dict[str, Tensor] = {}
        self.constant_fakes: list[Tensor] = []
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Any] = []  # ids are unique only among live objects

    def bind(self, value: Tensor, node: fx.Node) -> None:
        """Register ``node`` as the source of ``value``."""
        self._nodes[id(value)] = node
        self._alive.append(value)

    def clear(self) -> None:
        """Forget the tensors, so that they live no longer than their other users want."""
        self._nodes.clear()
        self._alive.clear()
        self.constant_fakes.clear()

    def has(self, value: Any) -> bool:
        """Return whether a node of the graph produces this tensor object."""
        return id(value) in self._nodes

    def is_state(self, value: Tensor) -> bool:
        """Return whether a tensor belongs to the model."""
        return id(value) in self.faked_model.state or id(value) in self.faked_model.plain

    def node(self, value: Tensor) -> fx.Node:
        """Return the node of a tensor; for a tensor of the model, a node that reads it.

        Raises: TraceError if no recorded call produced the tensor.
        """
        node = self._nodes.get(id(value))
        if node is not None:
            return node
        name = self.faked_model.state.get(id(value))
        if name is None and id(value) in self.faked_model.plain:
            label, real = self.faked_model.plain[id(value)]
            name = self._add_constant(label, real)
            self.constant_fakes.append(value)
        if name is None:
            raise unsupported(
                f"a tensor of shape {tuple(value.shape)} {UNSEEN}",
                "create it with a public torch function in forward, or in __init__ with register_buffer",
            )
        node = self.graph.get_attr(name)
        node.meta["val"] = value
        self.bind(value, node)
        return node

    def _add_constant(self, label: str, value: Tensor) -> str:
        name = "constant_" + "".join(c if c.isalnum() else "_" for c in label)
        while name in self.constants:
            name += "_"
        with unset_fake_temporarily():
            self.constants[name] = value.detach().clone()
        return name

    def faked(self, value: Any) -> Any:
        """Return arguments with every real tensor replaced by its fake, which is a constant of the graph."""
        if isinstance(value, Tensor):
            if isinstance(value, FakeTensor):
                return value
            return self.constant(value)
        if isinstance(value, (list, tuple, dict)) and any(not isinstance(t, FakeTensor) for t in tensors_in(value)):
            if isinstance(value, dict):
                return {key: self.faked(item) for key, item in value.items()}
            items = [self.faked(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def constant(self, value: Tensor) -> Tensor:
        """Return the fake of a real tensor that the forward uses; its value becomes part of the graph."""
        fake = self.faked_model.of_real.get(id(value))
        if fake is None:
            if value.requires_grad and torch._C._functorch.is_functorch_wrapped_tensor(value):
                raise unsupported(f"torch.func {TRANSFORMED}", "remove the call")
            if value.requires_grad:
                raise unsupported(
                    f"a tensor of shape {tuple(value.shape)} that requires a gradient is not a parameter of the model",
                    "register it in the model as an nn.Parameter; let a loss that has parameters be the nn.Module "
                    "itself (loss = criterion, not a function that calls it); or detach() it",
                )
            fake = self.faked_model.mode.from_tensor(value, static_shapes=True)
            self.faked_model.plain[id(fake)] = str(len(self.faked_model.plain)), value
            self.faked_model.of_real[id(value)] = fake
            self._alive += [value, fake]
        return fake

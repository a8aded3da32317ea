"""Write calls into an ``fx.Graph``, and keep the source node of each tensor that they return."""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from autopipe.trace.explain import unsupported
from autopipe.trace.numbers import Lifted
from autopipe.trace.record.faked_model import FakedModel
from autopipe.trace.record.symbols import Symbols
from autopipe.trace.record.targets import Call
from autopipe.trace.record.tensor_nodes import TensorNodes
from autopipe.trace.record.values import SYMBOLIC, tensors_in


class Pause:
    """``with pause:`` records no calls."""

    def __init__(self) -> None:
        self._depth = 0
        self._owner = threading.get_ident()

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1

    @property
    def listening(self) -> bool:
        """Whether calls are recorded now: not in a ``with`` block, nor in another thread."""
        return not self._depth and threading.get_ident() == self._owner


class GraphWriter:
    """Writes a graph. Values are identified by the tensor object."""

    def __init__(
        self, faked_model: FakedModel, symbols: Symbols, pause: Pause, describe: Callable[[fx.Node], None]
    ) -> None:
        """Begin an empty graph. ``describe``: receives every new call, to set its metadata."""
        self.graph = fx.Graph()
        self.known = TensorNodes(self.graph, faked_model)
        self.symbols = symbols
        self.inputs: dict[str, fx.Node] = {}
        self.unknown: list[Any] = []  # parts of results that differ from batch to batch
        # receives (symbol, node, dimension) for each new size that depends on the data
        self.on_size: Callable[[Any, fx.Node, int], None] | None = None
        self._pause, self._describe = pause, describe

    # --- inputs and outputs -------------------------------------------------------------------------------------------

    def add_input(self, name: str, value: Tensor) -> None:
        """Declare a tensor of the batch."""
        node = self.graph.placeholder(name)
        node.name = name  # fx would rename "input"
        node.meta["val"] = value
        self.inputs[name] = node
        self._track(value, node)
        self.symbols.declare(node, value)

    def set_output(self, values: tuple[Tensor, ...]) -> None:
        """Declare the outputs of the forward."""
        self.graph.output(tuple(self.known.node(value) for value in values))

    # --- calls --------------------------------------------------------------------------------------------------------

    def append(self, kind: str, target: Any, args: tuple[Any, ...]) -> fx.Node:
        """Add a call that the user did not make (size arithmetic, the copy into a buffer) at the current place."""
        node: fx.Node = getattr(self.graph, kind)(target, args)
        self._describe(node)
        return node

    def record(self, call: Call, changed: list[Tensor], random: tuple[int, int]) -> fx.Node:
        """Add a call of the user. ``changed``: the tensors that it wrote to. ``random``: (position, count) of draws."""
        args = self._argument(call.args)
        kwargs = {key: self._argument(value) for key, value in call.kwargs.items()}
        mutates = [self.known.node(tensor) for tensor in changed if self.known.has(tensor)]
        node: fx.Node = getattr(self.graph, call.kind)(call.target, args, kwargs)
        self._describe(node)
        node.meta["random"] = random
        node.meta["mutates"] = list(dict.fromkeys(entry for entry in mutates if entry.op != "get_attr"))
        node.meta["changed"] = changed
        return node

    def _argument(self, value: Any) -> Any:
        """Return an argument in the form that ``fx`` takes: tensors and symbolic sizes as nodes."""
        if isinstance(value, Tensor):
            return self.known.node(value)
        if isinstance(value, SYMBOLIC):
            return self._size(value)
        if isinstance(value, Lifted):
            return self.append("call_method", "item", (self.inputs[value.name],))
        if isinstance(value, (list, tuple)):
            if hasattr(value, "_fields") and next(tensors_in(value), None) is not None:
                return self.append("call_function", type(value), tuple(self._argument(item) for item in value))
            items = [self._argument(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {key: self._argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self._argument(item) for item in (value.start, value.stop, value.step)))
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            with unset_fake_temporarily():
                real = torch.from_numpy(value.copy())
            return self.known.node(self.known.constant(real))
        if isinstance(value, torch.Generator):
            raise unsupported("a torch.Generator that the model owns", "omit generator=; every draw gets its own seed")
        return value

    def _size(self, value: Any) -> Any:
        node = self.size_node(value.node.expr)
        return bool(node) if isinstance(value, torch.SymBool) and not isinstance(node, fx.Node) else node

    def size_node(self, expression: Any) -> Any:
        """Return the node of a size expression, or its value if it is a number. Raises: TraceError."""
        try:
            return self.symbols.node(expression, self.append)
        except KeyError as error:
            raise unsupported(
                f"a size is computed with {error.args[0]}, which cannot be written as source text ({expression})",
                "compute it from x.shape with + - * // %",
            ) from None

    # --- results ------------------------------------------------------------------------------------------------------

    def bind(self, out: Any, node: fx.Node, in_place: bool) -> Any:
        """Make ``node`` the source of the tensors in ``out``; return the result for the user's code."""
        if isinstance(out, Tensor):
            node.meta["val"] = out
            if in_place:
                self.bind_in_place(out, node)
                return out
            if self.known.has(out) or self.known.is_state(out):
                # x.contiguous() may return x itself; another object keeps the source of the user's x
                with self._pause:
                    out = node.meta["val"] = out.view_as(out)
            self._track(out, node)
            return out
        if isinstance(out, (list, tuple)):
            node.meta["length"] = len(out)
            for index, item in enumerate(out):
                self._bind_item(item, node, index)
        elif isinstance(out, dict):
            for key, item in out.items():
                self._bind_item(item, node, key)
        elif dataclasses.is_dataclass(out):
            self._bind_object(out, node)
        return out

    def _bind_item(self, item: Any, node: fx.Node, key: Any) -> None:
        if isinstance(item, Tensor) and self.known.has(item):
            return
        if any(item is unknown for unknown in self.unknown):
            return
        if next(tensors_in(item), None) is None and not dataclasses.is_dataclass(item):
            return
        part = self.append("call_function", operator.getitem, (node, key))
        self.bind(item, part, in_place=True)

    def _bind_object(self, value: Any, node: fx.Node) -> None:
        """Make attributes of ``node`` the source of the tensors in an object that a call returned."""
        for name in vars(value):
            attribute = getattr(value, name)
            if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(attribute)):
                self.bind(attribute, self.append("call_function", getattr, (node, name)), in_place=True)

    def bind_in_place(self, value: Tensor, node: fx.Node) -> None:
        """Make ``node`` the source of a tensor that it changed, unless the tensor belongs to the model."""
        if not self.known.is_state(value):
            self._track(value, node)

    def _track(self, value: Tensor, node: fx.Node) -> None:
        self.known.bind(value, node)
        if node.op == "placeholder":
            return
        for symbol, dimension in self.symbols.declare_made(node, value):
            if self.on_size is not None:
                self.on_size(symbol, node, dimension)

    def alias(self, value: Tensor, of: Tensor) -> None:
        """Register ``value`` as another object for ``of``."""
        self._track(value, self.known.node(of))

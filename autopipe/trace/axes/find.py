"""Find the axes of a captured model: read each call with its rule, then collect what can be divided.

No module name and no pattern is used. A call without a rule marks all its sizes as whole, so it only loses an
opportunity. What is found is verified on numbers before a team uses it (``verified``).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from autopipe.ir.graph import Graph
from autopipe.ir.tensor import TensorSpec
from autopipe.trace.axes import lookups, products, reductions, shapes
from autopipe.trace.axes.call import FUNCTIONS, MODULES, Call, Parts, Roles, shape_of
from autopipe.trace.axes.dimension_factors import DimensionFactors, Dims, NoRuleError

_RULES = (lookups, products, reductions, shapes)  # importing them registers their rules
_OWN = ("getattr", "torch.", "operator.", "_operator.", "builtins.", "math.")
_GROUPED = ("grouped_mm", "grouped_mm_fallback")  # operators of other libraries that have the rule of torch's


logger = logging.getLogger(__name__)


@dataclass
class Reading:
    """The sizes of every value, after all calls were read."""

    leaves: DimensionFactors
    roles: Roles
    values: dict[str, Dims | Parts]  # value -> its dimensions
    state: dict[str, Dims]  # parameter, buffer or constant -> its dimensions
    not_followed: set[str] = field(default_factory=set)  # calls without a rule, or that their rule does not cover


class Reader:
    """Reads the calls of a graph in order."""

    def __init__(self, graph: Graph, module: fx.GraphModule) -> None:
        self._graph = graph
        self._module = module
        self._names: dict[int, str] = {}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self._names.setdefault(id(tensor), graph.aliases.get(name, name))
        self.reading = Reading(DimensionFactors(), Roles(), {}, {})

    def read(self) -> Reading:
        """Read all calls."""
        described: dict[str, TensorSpec | None] = {entry.name: entry.spec for entry in self._graph.inputs}
        described |= {node.name: node.spec for node in self._graph.nodes}
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                self._values[node.name] = self._whole(self._shape(node), "a dimension of the batch")
                self._mark_dynamic(node.name, described[node.name])
            elif node.op == "output":
                for value in node.all_input_nodes:
                    self._mark(self._dims(value), "the model's result")
            elif node.op != "get_attr":
                self.reading.leaves.call = node.name
                self._call(node)
                self.reading.leaves.call = ""
                if node.name in described:  # the sizes of the batch are not
                    self._mark_dynamic(node.name, described[node.name])
        return self.reading

    @property
    def _values(self) -> dict[str, Dims | Parts]:
        return self.reading.values

    def _call(self, node: fx.Node) -> None:
        module = self._module.get_submodule(str(node.target)) if node.op == "call_module" else None
        call = Call(node, module, self.reading.leaves, self.reading.roles, self._dims)
        rule = MODULES.get(type(module)) if module is not None else FUNCTIONS.get(self._name(node))
        name = type(module).__name__ if module is not None else self._name(node) or _shown(node)
        try:
            if rule is None or node.meta.get("opaque"):
                raise NoRuleError("it has no rule")
            dims = rule(call)
            self._check(node, dims)
            self._values[node.name] = dims
        except Exception as why:  # whatever a rule did not expect only loses an opportunity
            if not isinstance(why, NoRuleError):
                logger.info("the rule of %s fails for %s", name, node.name, exc_info=True)
            self.reading.not_followed.add(node.name)
            reason = f"read by {name}" + ("" if rule is None else f": {why}")
            operands = [self._dims(value) for value in node.all_input_nodes]
            if module is not None:
                operands += [self._dims(tensor) for tensor in (*module.parameters(), *module.buffers())]
            for operand in operands:
                self._mark(operand, reason)
            self._unknown(node, f"made by {name}")

    def _unknown(self, node: fx.Node, why: str) -> None:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            with contextlib.suppress(NoRuleError):
                self._values[node.name] = self._whole(shape_of(value), why)
        elif isinstance(node.meta.get("length"), int):
            self._values[node.name] = (None,) * node.meta["length"]

    def _check(self, node: fx.Node, dims: Dims | Parts) -> None:
        """Raise NoRuleError if a rule returned other sizes than the call."""
        value = node.meta.get("val")
        if isinstance(dims, list) and isinstance(value, Tensor):
            leaves = self.reading.leaves
            if [leaves.length(leaves.flat(dimension)) for dimension in dims] != [*shape_of(value)]:
                raise NoRuleError("its result has another shape than expected")
        elif isinstance(dims, list):
            raise NoRuleError("its result is not one tensor")

    def _mark_dynamic(self, name: str, spec: TensorSpec | None) -> None:
        """Mark sizes that differ from batch to batch."""
        dims = self._values.get(name)
        if spec is None or not isinstance(dims, list):
            return
        for size, dimension in zip(spec.shape, dims, strict=True):
            flat = self.reading.leaves.flat(dimension)
            if isinstance(size, str) and len(flat) == 1:
                self.reading.leaves.mark_varying(flat)

    def _name(self, node: fx.Node) -> str:
        """Return the name of a function of torch or a method, or "" for another function."""
        if node.op == "call_method":
            return str(node.target)
        target: Any = node.target
        name = getattr(target, "__name__", "") or str(target)
        name = name.removesuffix(".default").rpartition(".")[2] if "." in name else name
        place = node.meta["node"].target if "node" in node.meta else getattr(target, "__module__", "")
        return name if place.startswith(_OWN) or name in _GROUPED else ""

    def _dims(self, value: Any) -> Dims | Parts | None:
        """Return the dimensions of a node, a parameter or a buffer."""
        if isinstance(value, fx.Node):
            if value.op != "get_attr":
                return self._values.get(value.name)
            value, target = attribute(self._module, str(value.target)), str(value.target)
            return self._state(value, self._names.get(id(value), target)) if isinstance(value, Tensor) else None
        if isinstance(value, Tensor) and id(value) in self._names:
            return self._state(value, self._names[id(value)])
        return None

    def _state(self, tensor: Tensor, name: str) -> Dims:
        if name not in self.reading.state:
            self.reading.state[name] = self.reading.leaves.fresh(tensor.shape)
        return self.reading.state[name]

    @staticmethod
    def _shape(node: fx.Node) -> tuple[int, ...]:
        value = node.meta.get("val")
        return shape_of(value) if isinstance(value, Tensor) else ()

    def _whole(self, shape: Iterable[int], why: str) -> Dims:
        dims = self.reading.leaves.fresh(shape)
        self._mark(dims, why)
        return dims

    def _mark(self, dims: Dims | Parts | None, why: str) -> None:
        for part in dims if isinstance(dims, tuple) else (dims,):
            for dimension in part or []:
                self.reading.leaves.mark_whole(dimension, why)


def _shown(node: fx.Node) -> str:
    """Return the name of a function without a rule."""
    target = node.meta["node"].target if "node" in node.meta else str(node.target)
    return ".".join(target.split(".")[-2:])


def attribute(module: nn.Module, target: str) -> Any:
    """Return what a ``get_attr`` node reads."""
    value: Any = module
    for name in target.split("."):
        value = getattr(value, name)
    return value

"""Walk back from the loss, through linear operations, to the reductions over the batch: the divisors of its terms.

Terms that the walk cannot analyse are skipped, and so are terms without a gradient.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopipe.ir.graph import Graph
from autopipe.ir.tensor import TensorSpec, evaluate, symbols_of
from autopipe.trace.loss.losses import LossCall, loss_call, name_of

# linear calls on a value without a batch dimension: they keep the divisor
_SAME = frozenset({
    "neg", "pos", "clone", "contiguous", "to", "float", "double", "half", "bfloat16", "type", "type_as", "view",
    "reshape", "squeeze", "unsqueeze", "flatten", "expand", "expand_as", "getitem", "select", "permute",
    "transpose", "cpu", "cuda", "requires_grad_", "view_as", "reshape_as", "_to_copy", "alias",
})  # fmt: skip
_ADD = frozenset({"add", "sub", "iadd", "isub", "add_", "sub_", "rsub", "subtract"})
_TIMES = frozenset({"mul", "imul", "mul_", "multiply"})
_OVER = frozenset({"truediv", "itruediv", "div", "div_", "true_divide", "divide"})
_JOIN = frozenset({"stack", "cat", "concat", "concatenate", "hstack", "vstack"})
_CONTRACT = frozenset({"dot", "vdot", "inner", "matmul", "mv", "mm", "einsum", "tensordot", "bmm"})


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of a divisor."""

    kind: str  # "samples", "targets" (those that are not ignored) or "value" (a scalar of the batch)
    value: str = ""  # the targets, or the scalar
    ignored: int = 0  # target that does not count
    weight: str = ""  # class weights
    inverse: bool = False  # the loss is multiplied by the factor


SAMPLES = (Factor("samples"),)
Product = tuple[Factor, ...]


class _UnreadableError(Exception):
    """The walk reached a call that is not known to be linear."""


@dataclass
class Walk:
    """Walks back from the loss."""

    graph: Graph
    module: fx.GraphModule
    divisors: dict[Product, None] = field(default_factory=dict)  # of every term
    penalty: bool = False  # see ``Divisor``

    def __post_init__(self) -> None:
        # "" if no shape contains the number of samples: then every dimension may count samples
        self.batch = self.graph.samples.name if self.graph.samples is not None else ""
        self.nodes = {node.name: node for node in self.module.graph.nodes}
        self.of = {node.name: node for node in self.graph.nodes}
        self.inputs = {entry.name: entry.spec for entry in self.graph.inputs}
        self.writers: dict[str, set[str]] = {}
        for node in self.graph.nodes:
            for value in node.mutates:
                self.writers.setdefault(value, set()).add(node.name)
        self.written = {name for node in self.graph.nodes for name in node.buffers_written}

    def products(self) -> list[Product]:
        """Return the distinct divisors of the terms that could be analysed."""
        self._term(self.nodes[self.graph.outputs[0]], (), frozenset())
        return list(self.divisors)

    # --- what is known of a value -------------------------------------------------------------------------------------

    def spec(self, value: Any) -> TensorSpec | None:
        """Return the spec of a value, or None if it is not one tensor."""
        if not isinstance(value, fx.Node):
            return None
        if value.op == "get_attr":
            name = str(value.target)
            return self.graph.parameters.get(name, self.graph.buffers.get(name))
        return self.inputs.get(value.name) or (self.of[value.name].spec if value.name in self.of else None)

    def has_batch(self, value: Any) -> bool:
        """Return whether the shape of a value depends on the number of samples."""
        spec = self.spec(value)
        if not self.batch:
            return spec is not None and bool(spec.shape) and self._on_batch(value)
        return spec is not None and any(self.batch in symbols_of(size) for size in spec.shape)

    def _is_trained(self, value: Any) -> bool:
        spec = self.spec(value)
        return isinstance(value, fx.Node) and (spec.requires_grad if spec is not None else self._has_parameters(value))

    def _has_parameters(self, value: fx.Node) -> bool:
        return any(node.op == "get_attr" and self._is_trained(node) for node in self.above(value)) or any(
            self.of[node.name].parameters for node in self.above(value) if node.name in self.of
        )

    def above(self, value: fx.Node) -> Iterator[fx.Node]:
        """Yield a value and its ancestors, including calls that changed it in place."""
        seen: set[str] = set()
        stack = [value]
        while stack:
            node = stack.pop()
            if node.name in seen:
                continue
            seen.add(node.name)
            yield node
            stack.extend(node.all_input_nodes)
            if node.name in self.of:
                stack.extend(self.nodes[name] for name in self.of[node.name].after)

    def is_pure(self, value: Any) -> bool:
        """Return whether a value depends only on the batch and constants: no parameter, draw or changing buffer."""
        if not isinstance(value, fx.Node):
            return True
        for node in self.above(value):
            if node.op == "placeholder":
                continue
            if node.op == "get_attr":
                if str(node.target) in self.graph.parameters or str(node.target) in self.written:
                    return False
                continue
            about = self.of[node.name]
            if about.parameters or about.num_random or about.buffers_written or node.op == "call_module":
                return False
            if self.written & set(about.buffers):
                return False
        return not self.changed_later(value)

    def changed_later(self, value: fx.Node, *, by: frozenset[str] = frozenset()) -> bool:
        """Return whether a call outside of the walk writes to a value."""
        return bool(self.writers.get(value.name, set()) - by - {value.name})

    def depends_on_batch(self, value: Any) -> bool:
        """Return whether a value differs between the microbatches of one minibatch."""
        if not isinstance(value, fx.Node):
            return False
        names = [node.name for node in self.above(value) if node.op == "placeholder"]
        return any(self.has_batch(self.nodes[name]) for name in names)

    def is_per_sample(self, value: Any) -> bool:
        """Return whether the number of elements is proportional to the samples (not a table of samples by samples)."""
        spec = self.spec(value)
        if spec is None:
            return False
        if not self.batch:
            return 0 not in spec.shape
        sizes = {symbol.name: symbol.hint for symbol in self.graph.symbols}

        def elements(samples: int) -> int:
            count = 1
            for size in spec.shape:
                count *= evaluate(size, {**sizes, self.batch: samples})
            return count

        return all(elements(number) == number * elements(1) for number in (2, 3, 7)) and elements(1) > 0

    # --- the walk -----------------------------------------------------------------------------------------------------

    def _term(self, value: Any, product: Product, path: frozenset[str]) -> None:
        """Find the divisors of a value without a batch dimension. ``product``: the divisors so far."""
        if not isinstance(value, fx.Node) or not self._is_trained(value):
            return  # a constant has no gradient
        if not self._on_batch(value):
            self.penalty = True
            return
        try:
            self._call(value, product, path | {value.name})
        except _UnreadableError:
            return

    def _on_batch(self, value: fx.Node) -> bool:
        return any(node.op == "placeholder" for node in self.above(value))

    def _call(self, node: fx.Node, product: Product, path: frozenset[str]) -> None:
        if node.op in ("placeholder", "get_attr") or self.has_batch(node) or self.changed_later(node, by=path):
            raise _UnreadableError
        name = name_of(node)
        call = loss_call(node, self.module)
        if call is not None:
            self._loss(call, product)
        elif name in _SAME:
            self._passed(node.args[0], product, path)
        elif name in _ADD and len(node.args) > 1:
            self._term(node.args[0], product, path)
            self._term(node.args[1], product, path)
        elif name in _TIMES and len(node.args) > 1:
            self._times(node.args[0], node.args[1], product, path)
        elif name in _OVER and len(node.args) > 1:
            self._scaled(node.args[0], node.args[1], product, path, inverse=False)
        elif name in ("sum", "mean"):
            self._reduced(node, name, product, path)
        elif name in _JOIN and isinstance(node.args[0], (list, tuple)):
            for entry in node.args[0]:
                self._passed(entry, product, path)
        elif name in _CONTRACT and any(self.has_batch(entry) for entry in node.all_input_nodes):
            self._add(product)
        else:
            raise _UnreadableError

    def _add(self, product: Product) -> None:
        factors = [factor for factor in product if not (factor.kind == "value" and not self._varies(factor))]
        self.divisors[tuple(sorted(factors, key=dataclasses.astuple))] = None

    def _varies(self, factor: Factor) -> bool:
        """Return whether a factor differs between microbatches; a factor common to the minibatch cancels out."""
        return self.depends_on_batch(self.nodes[factor.value])

    def _passed(self, value: Any, product: Product, path: frozenset[str]) -> None:
        if self.has_batch(value):
            raise _UnreadableError  # one sample is selected, or the batch has one sample
        self._term(value, product, path)

    def _times(self, left: Any, right: Any, product: Product, path: frozenset[str]) -> None:
        if self._is_trained(left) and self._is_trained(right):
            # a learned weight of a term does not depend on the batch
            free = [entry for entry in (left, right) if not self._on_batch(entry)]
            if len(free) != 1:
                raise _UnreadableError
            self._passed(right if free[0] is left else left, product, path)
        elif self._is_trained(left):
            self._scaled(left, right, product, path, inverse=True)
        else:
            self._scaled(right, left, product, path, inverse=True)

    def _scaled(self, value: Any, by: Any, product: Product, path: frozenset[str], *, inverse: bool) -> None:
        """Follow ``value / by``, or ``value * by`` if ``inverse``."""
        if isinstance(by, fx.Node) and self._on_batch(by):
            spec = self.spec(by)
            if not self.is_pure(by) or (spec is not None and spec.shape not in ((), (1,))):
                raise _UnreadableError
            degree = None if inverse else self._degree(by)
            product = (
                *product,
                *((Factor("value", by.name, inverse=inverse),) if degree is None else SAMPLES * degree),
            )
        self._passed(value, product, path)

    def _degree(self, value: Any) -> int | None:
        """Return the exponent of the batch size in a product of sizes, or None for any other value."""
        if not isinstance(value, fx.Node):
            return 0 if isinstance(value, int) else None
        if value.target == "size" and len(value.args) == 2:
            spec, dimension = self.spec(value.args[0]), value.args[1]
            if spec is None or not isinstance(dimension, int):
                return None
            size = spec.shape[dimension]
            return (1 if size == self.batch else None) if self.batch in symbols_of(size) else 0
        if value.target is operator.mul:
            degrees = [self._degree(entry) for entry in value.args]
            return None if None in degrees else sum(degree or 0 for degree in degrees)
        return None

    def _reduced(self, node: fx.Node, name: str, product: Product, path: frozenset[str]) -> None:
        value = node.args[0] if node.args else node.kwargs.get("input")
        if not self.has_batch(value):
            self._term(value, product, path)
        elif name == "sum":
            self._add(product)
        elif self.is_per_sample(value):
            self._add((*product, *SAMPLES))
        else:
            raise _UnreadableError

    def _loss(self, call: LossCall, product: Product) -> None:
        operands = [value for value in call.operands if self.has_batch(value)]
        if not operands or not all(map(self.is_per_sample, operands)):
            raise _UnreadableError
        if call.reduction == "sum":
            self._add(product)
            return
        if call.reduction != "mean":
            raise _UnreadableError
        target = call.target
        spec = self.spec(target)
        if not isinstance(target, fx.Node) or spec is None or spec.dtype.startswith(("float", "bfloat")):
            self._add((*product, *SAMPLES))
        elif not self.is_pure(target):  # computed by the model, so that no target is ignored
            if call.weight is not None:
                raise _UnreadableError
            self._add((*product, *SAMPLES))
        elif call.weight is None or (isinstance(call.weight, str) or self.is_pure(call.weight)):
            weight = call.weight.name if isinstance(call.weight, fx.Node) else call.weight or ""
            self._add((*product, Factor("targets", target.name, call.ignored, weight)))
        else:
            raise _UnreadableError

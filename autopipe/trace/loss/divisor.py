"""Find the divisor of the loss in the captured graph, so that microbatches add up to the complete batch.

A loss is S / D, where S is a sum over the samples and D depends only on the batch. Microbatch j has S_j / D_j, and the
complete batch is the sum of (D_j / D) * S_j / D_j. So the share of a microbatch is D_j / D. For a mean over samples
that is n_j / n, and no divisor is stored. For cross entropy with ``ignore_index``, D counts the remaining targets, for
``(loss * mask).sum() / mask.sum()`` it is ``mask.sum()``, and for a plain sum it is 1.

A loss with several terms has several divisors; all are kept, since they agree on many batches. If the loss does not
have this form, microbatches may compute something other than the batch; ``coupling`` detects this by comparing
gradients.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopipe.ir.graph import Graph, Node
from autopipe.trace.graph.replay import replay
from autopipe.trace.loss.reductions import SAMPLES, Factor, Product, Walk
from autopipe.trace.record.targets import qualified_name

_NO_DRAWS = (0, 0, 0)  # where a graph without random draws is run


@dataclass(frozen=True)
class Divisor:
    """The divisor of a loss."""

    module: fx.GraphModule  # computes the divisors from the batch
    graph: Graph
    outputs: tuple[str, ...]  # one for each term of the loss; "" means 1, for a sum over the batch
    constants: dict[str, Tensor]  # tensors that ``module`` reads
    penalty: bool  # the loss has a term that does not depend on the batch, so the shares must add up to 1
    text: str  # human-readable form

    def values(self, leaves: Mapping[str, Tensor]) -> list[float]:
        """Return the divisors of a batch, one for each term of the loss."""
        with torch.no_grad():
            outputs = replay(self.module, leaves, _NO_DRAWS)
        numbers = iter(outputs)
        return [float(next(numbers)) if name else 1.0 for name in self.outputs]


def find_divisor(graph: Graph, module: fx.GraphModule) -> Divisor | None:
    """Return the divisor of the loss of a captured model.

    None if it is the number of samples, if it cannot be derived, or if the loss returns its own weight.
    """
    if len(graph.outputs) != 1:
        return None
    walk = Walk(graph, module)
    products = walk.products()
    if not products or products == [SAMPLES]:
        return None
    if graph.samples is None and any(factor in SAMPLES for product in products for factor in product):
        return None  # no input gives the number of samples
    return _Writer(walk).divisor(products)


def has_known_divisor(graph: Graph, module: fx.GraphModule) -> bool:
    """Return whether the divisor of the loss of a model can be derived, or the loss returns its own weight."""
    return len(graph.outputs) != 1 or bool(Walk(graph, module).products())


class _Writer:
    """Writes the divisors as a separate graph: their inputs from the batch, and the arithmetic."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.nodes: list[Node] = []
        self.constants: dict[str, Tensor] = {}

    def divisor(self, products: Sequence[Product]) -> Divisor:
        walk = self.walk
        for entry in walk.module.graph.nodes:
            if entry.op == "placeholder":
                self.copies[entry] = self.graph.node_copy(entry)
                self.copies[entry].name = entry.name  # torch.fx would rename "input", for example
        needed = {
            node
            for product in products
            for factor in product
            for name in (factor.value, factor.weight)
            if name in walk.nodes
            for node in walk.above(walk.nodes[name])
        }
        for entry in walk.module.graph.nodes:
            if entry in needed and entry not in self.copies:
                self.copies[entry] = self._copied(entry)
        outputs = [self._product(product) for product in products]
        self.graph.output(tuple(node for node in outputs if node is not None))
        holder = torch.nn.Module()
        for name, tensor in self.constants.items():
            holder.register_buffer(name, tensor)
        module = fx.GraphModule(holder, self.graph)
        names = tuple("" if node is None else node.name for node in outputs)
        loss = tuple(dict.fromkeys(filter(None, names))) or (walk.graph.inputs[0].name,)
        graph = dataclasses.replace(
            walk.graph, nodes=tuple(self.nodes), outputs=loss, parameters={}, buffers={}, aliases={}
        )
        text = ", and ".join(dict.fromkeys(self._text(product) for product in products))
        return Divisor(module, graph, names, self.constants, walk.penalty, text)

    def _copied(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            return self._constant(str(node.target))
        copy = self.graph.node_copy(node, self.copies.__getitem__)
        about = self.walk.of[node.name]
        constants = tuple(str(self.copies[entry].target) for entry in node.all_input_nodes if entry.op == "get_attr")
        self._described(
            copy,
            dataclasses.replace(
                about,
                name=copy.name,
                inputs=tuple(n.name for n in copy.all_input_nodes if n.op != "get_attr"),
                after=(),
                buffers=(),
                constants=constants,
                storage="",
                mutates=tuple(self.copies[self.walk.nodes[name]].name for name in about.mutates),
            ),
        )
        return copy

    def _constant(self, path: str) -> fx.Node:
        """Return a tensor of the model as a constant: a buffer that no forward writes, or a plain tensor."""
        entry: fx.Node
        for entry in self.graph.nodes:
            if entry.op == "get_attr" and entry.meta["path"] == path:
                return entry
        name = f"constant_{len(self.constants)}"
        owner, _, last = path.rpartition(".")
        tensor: Tensor = getattr(self.walk.module.get_submodule(owner), last)
        self.constants[name] = tensor.detach()
        node = self.graph.create_node("get_attr", name)
        node.meta["path"] = path
        return node

    def _described(self, node: fx.Node, about: Node) -> None:
        node.meta["node"] = about
        self.nodes.append(about)

    def _call(self, op: str, target: Any, *args: Any, name: str = "divisor") -> fx.Node:
        node = self.graph.create_node(op, target, args, name=name)
        reads = node.all_input_nodes
        text = target if isinstance(target, str) else qualified_name(target)
        self._described(
            node,
            Node(
                node.name,
                op,
                text,
                tuple(entry.name for entry in reads if entry.op != "get_attr"),
                None,
                constants=tuple(str(entry.target) for entry in reads if entry.op == "get_attr"),
            ),
        )
        return node

    def _product(self, product: Product) -> fx.Node | None:
        result: fx.Node | None = None
        for factor in sorted(product, key=lambda factor: factor.inverse):
            value = self._factor(factor)
            if result is None and not factor.inverse:
                result = value
            elif result is None:
                result = self._call("call_function", operator.truediv, 1, value)
            else:
                sign = operator.truediv if factor.inverse else operator.mul
                result = self._call("call_function", sign, result, value)
        return result

    def _factor(self, factor: Factor) -> fx.Node:
        if factor.kind == "samples":
            symbol = self.walk.graph.samples
            assert symbol is not None, "find_divisor returns None without one"
            entry = self.copies[self.walk.nodes[symbol.input]]
            return self._call("call_method", "size", entry, symbol.dimension, name="size")
        value = self.copies[self.walk.nodes[factor.value]]
        if factor.kind == "value":  # a number computed from sizes is written only where it is read
            number = self.walk.spec(self.walk.nodes[factor.value]) is None
            return self._call("call_function", operator.truediv, value, 1) if number else value
        counts = self._call("call_function", operator.ne, value, factor.ignored, name="counts")
        if factor.weight:
            known = self.walk.nodes.get(factor.weight)
            weight = self._constant(factor.weight) if known is None else self.copies[known]
            chosen = self._call("call_function", operator.mul, value, counts, name="classes")  # ignored ones: class 0
            weights = self._call("call_function", operator.getitem, weight, chosen, name="weights")
            wide = self._call("call_method", "double", weights, name="weights")
            counts = self._call("call_function", operator.mul, wide, counts, name="counts")
        return self._call("call_method", "sum", counts)

    def _text(self, product: Product) -> str:
        if not product:
            return "nothing (a sum over the batch)"
        return " times ".join(self._factor_text(factor) for factor in product)

    def _factor_text(self, factor: Factor) -> str:
        if factor.kind == "samples":
            return "the samples"
        if factor.kind == "targets":
            weighed = ", weighted by class" if factor.weight else ""
            return f"the targets other than {factor.ignored}{weighed}"
        about = self.walk.of.get(factor.value)
        line = about.source.rpartition("/")[2] if about is not None else ""
        name = f"{factor.value} of {line}" if line else factor.value
        return f"one over {name}" if factor.inverse else name

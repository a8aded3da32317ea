"""Prove a capture on real numbers, on batches as small as the model accepts: two runs, or more where these disagree."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from autopipe.devices import reraise_failure_of_device
from autopipe.errors import TraceError
from autopipe.ir.graph import Node
from autopipe.trace import two_runs
from autopipe.trace.graph.describe import GUARD
from autopipe.trace.loss.coupling import coupling_of, statistics_notes
from autopipe.trace.placed import ON_CPU, Place
from autopipe.trace.result import Capture
from autopipe.trace.sizes.lengths import Length, shortened, shorter, shorter_parts
from autopipe.trace.verify import verify
from autopipe.workload import Item, Workload
from autopipe.workload.batches.forms import form_of
from autopipe.workload.batches.layouts import laid_out

logger = logging.getLogger(__name__)

_IN_PARTS = 5
"""Samples of a batch that is cut into three and two: neighbours in pairs are in different parts."""
_FEWEST_IN_PARTS = 3
"""Samples of a batch that is cut into two and one."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Compares captures of a model with the model."""

    workload: Workload
    model: nn.Module
    items: list[Item]  # the captured batch and, unless its number of samples is fixed, one of another size
    in_parts: bool  # compare a batch with its microbatches, too
    place: Place = ON_CPU  # where both compute

    @contextlib.contextmanager
    def _placed(self, captured: Capture) -> Iterator[Proof]:
        with self.place.having(self.workload, self.model, captured) as workload, self.place.in_float32():
            items = [self.place.item(self.workload, item) for item in self.items]
            yield dataclasses.replace(self, workload=workload, items=items)

    def on_batches(self, captured: Capture, batches: Sequence[Item]) -> None:
        """Compare a capture with the model on further batches. Raises: TraceError with the first value that differs."""
        with self._placed(captured) as own:
            there = [self.place.item(self.workload, batch) for batch in batches]
            verify(own.workload, self.model, captured.module, captured.graph, there)

    def at_lengths(self, captured: Capture, lengths: tuple[Length, ...]) -> Capture | None:
        """Prove a capture whose ``lengths`` may vary, and set their lower bounds to the shortest that agree.

        The gradients of the shortest batch are compared. What depends on later positions, such as a number of tokens
        in the whole batch, shows in the loss at the complete length, and in gradients only if some of them are cut.

        None if graph and model agree at no shorter length; the model may reject such batches (a label beyond the end,
        for example).
        """
        with self._placed(captured) as own:
            return own._at_lengths(captured, lengths)

    def _at_lengths(self, captured: Capture, lengths: tuple[Length, ...]) -> Capture | None:
        workload = self.workload
        if self.in_parts:
            batch, complete = (other_batch(workload, self.items[0], count) for count in (_IN_PARTS, _FEWEST_IN_PARTS))
            for part in shorter_parts(lengths):
                short = shortened(workload, batch, lengths, part)
                batches = [(short, True), (complete, _cuts_gradients(captured))]
                agreeing = two_runs.num_agreeing(workload, self.model, captured, batches)
                if agreeing == len(batches):
                    return self._with_exactness(bounded(captured, lengths, part))
                if agreeing:
                    break
        for part in shorter_parts(lengths):
            item = shortened(workload, self.items[0], lengths, part)
            try:
                verify(workload, self.model, captured.module, captured.graph, [item])
            except TraceError as why:
                reraise_failure_of_device(why)
                logger.info("lengths %s: %s", [shorter(length.size)[part] for length in lengths], why.what)
            else:
                return self._by_batches(bounded(captured, lengths, part))
        return None

    def of(self, captured: Capture) -> Capture:
        """Prove a capture. Raises: TraceError with the first value that differs."""
        with self._placed(captured) as own:
            if self.in_parts:
                batch = other_batch(own.workload, own.items[0], _IN_PARTS)
                if two_runs.num_agreeing(own.workload, self.model, captured, [(batch, True)]):
                    return own._with_exactness(captured)
            return own._by_batches(captured)

    def _by_batches(self, captured: Capture) -> Capture:
        """Compare a capture with the model on the same batches, and a batch with its microbatches."""
        workload, model, graph = self.workload, self.model, captured.graph
        # a decision is that of the captured batch, and an opaque module may do something else with each
        varies = any(node.target == GUARD or node.opaque for node in graph.nodes)
        exact, notes = verify(workload, model, captured.module, graph, self.items if varies else self.items[-1:])
        coupling = captured.coupling
        if self.in_parts:
            notes += statistics_notes(graph)
            coupling = coupling_of(workload, model, self.items[0], graph, captured.divisor)
        return dataclasses.replace(_with_result(captured, exact, notes), coupling=coupling)

    def _with_exactness(self, captured: Capture) -> Capture:
        """Add whether the bits are those of the model where nothing compiles."""
        exact, notes = True, list[str]()
        if captured.asks_compiling:
            exact, notes = verify(self.workload, self.model, captured.module, captured.graph, self.items[-1:])
        return _with_result(captured, exact, notes)


def _with_result(captured: Capture, exact: bool, notes: list[str]) -> Capture:
    graph = dataclasses.replace(captured.graph, exact=exact)
    return dataclasses.replace(captured, graph=graph, exact=exact, notes=(*captured.notes, *notes))


def bounded(captured: Capture, lengths: tuple[Length, ...], part: int) -> Capture:
    """Set the lower bound of each length to that of the shortest batch on which the graph was verified."""
    symbols = [symbol for symbol in captured.graph.symbols if symbol is captured.graph.samples]
    for symbol, length in zip(captured.graph.lengths, lengths, strict=False):
        symbols.append(dataclasses.replace(symbol, low=shorter(length.size)[part]))
    return dataclasses.replace(captured, graph=dataclasses.replace(captured.graph, symbols=tuple(symbols)))


def _cuts_gradients(captured: Capture) -> bool:
    """Return whether a value may reach the loss without its gradient, or with another one than its own."""
    graph = captured.graph
    specs = {node.name: node.spec for node in graph.nodes} | {entry.name: entry.spec for entry in graph.inputs}
    specs |= graph.parameters

    def is_cut(node: Node) -> bool:
        """Return whether a call reads what has a gradient, and its result has none."""
        reads = (specs.get(name) for name in (*node.inputs, *node.parameters))
        has_gradient = any(spec is not None and spec.requires_grad for spec in reads)
        return has_gradient and node.spec is not None and not node.spec.requires_grad

    return any(is_cut(node) or node.target.endswith(".apply") for node in graph.nodes)


def another_size(size: int) -> int:
    """Return a small number of samples that is not ``size``."""
    return 3 if size != 3 else 4


def other_batch(workload: Workload, item: Item, other: int) -> Item:
    """Return a batch of ``other`` samples, not those of ``item`` if the data has enough.

    Values that are not tensors are those of ``item``, with which the graph was captured: a number such as the count of
    labels in a batch is a constant of the graph.
    """
    batch_size = workload.num_samples(item)
    if not workload.cuts_by_dimension(workload.example_item(batch_size)):
        return workload.example_item(other)  # a part of such a batch may not be valid
    both = workload.example_item(batch_size + other)
    leaves, dimensions = workload.leaves(both), workload.batch_dims(both)
    other_leaves = {
        name: laid_out(leaf.narrow(dimensions[name], batch_size, other), leaf) if name in dimensions else leaf
        for name, leaf in leaves.items()
    }
    same = form_of(both).structure == form_of(item).structure
    return workload.with_leaves(item if same else both, other_leaves)

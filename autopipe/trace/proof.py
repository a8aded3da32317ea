"""Prove a capture on real numbers, on batches as small as the model accepts: two runs, or more where these disagree."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

from torch import nn

from autopipe.errors import TraceError
from autopipe.trace import two_runs
from autopipe.trace.graph.describe import GUARD
from autopipe.trace.loss.coupling import coupling_of, statistics_notes
from autopipe.trace.result import Capture
from autopipe.trace.sizes.lengths import Length, ends_differ, shortened, shorter, shorter_parts
from autopipe.trace.verify import verify
from autopipe.workload import Item, Workload
from autopipe.workload.batches.forms import form_of
from autopipe.workload.batches.layouts import laid_out

logger = logging.getLogger(__name__)

IN_PARTS = 5
"""Samples of a batch that is cut into three and two: neighbours in pairs are in different parts."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Compares captures of a model with the model."""

    workload: Workload
    model: nn.Module
    items: list[Item]  # the captured batch and, unless its number of samples is fixed, one of another size
    in_parts: bool  # compare a batch with its microbatches, too

    def at_lengths(self, captured: Capture, lengths: tuple[Length, ...]) -> Capture | None:
        """Prove a capture whose ``lengths`` may vary, and set their lower bounds to the shortest that agree.

        None if graph and model agree at no shorter length; the model may reject such batches (a label beyond the end,
        for example).
        """
        workload, whole = self.workload, self.items[0]
        # what differs between padded samples shows at the length of the batch only
        padded = ends_differ(workload.leaves(whole), lengths, workload.batch_dims(whole))
        if self.in_parts:
            whole = other_batch(workload, whole, IN_PARTS)
            for part in shorter_parts(lengths):
                batch = shortened(workload, whole, lengths, part)
                if self._agrees(captured, batch):
                    if padded and not self._agrees(captured, whole, gradients=False):
                        break
                    return self._with_exactness(bounded(captured, lengths, part), batch)
        for part in shorter_parts(lengths):
            try:
                short = [shortened(workload, self.items[0], lengths, part)]
                verify(workload, self.model, captured.module, captured.graph, short)
            except TraceError as why:
                logger.info("lengths %s: %s", [shorter(length.size)[part] for length in lengths], why.what)
                continue
            items = [each if padded else shortened(workload, each, lengths, part) for each in self.items]
            return dataclasses.replace(self, items=items).by_batches(bounded(captured, lengths, part))
        return None

    def of(self, captured: Capture) -> Capture:
        """Prove a capture. Raises: TraceError with the first value that differs."""
        if self.in_parts:
            batch = other_batch(self.workload, self.items[0], IN_PARTS)
            if self._agrees(captured, batch):
                return self._with_exactness(captured, batch)
        return self.by_batches(captured)

    def by_batches(self, captured: Capture) -> Capture:
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

    def _agrees(self, captured: Capture, batch: Item, *, gradients: bool = True) -> bool:
        return two_runs.agree(self.workload, self.model, captured, batch, gradients=gradients)

    def _with_exactness(self, captured: Capture, batch: Item) -> Capture:
        """Add whether the bits are those of the model where nothing compiles."""
        exact, notes = True, list[str]()
        if captured.asks_compiling:
            exact, notes = verify(self.workload, self.model, captured.module, captured.graph, [batch])
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


def smaller_batches(workload: Workload, item: Item, lengths: tuple[Length, ...]) -> list[Item]:
    """Return batches that the model may run in place of a batch, the smallest first, and the batch.

    ``lengths``: those that may vary.
    """
    batches = [item]
    if workload.num_samples(item) >= IN_PARTS and not workload.is_fixed(item):
        batches.insert(0, workload.split(item, 2)[0])
    return [shortened(workload, batches[0], lengths, part) for part in shorter_parts(lengths)] + batches


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

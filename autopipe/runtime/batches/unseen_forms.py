"""Batches whose form or shape differs from the captured one: their description, and a workload to capture them."""

from __future__ import annotations

from typing import Any

from autopipe.errors import RunError, counted
from autopipe.ir.batch import BatchForm
from autopipe.ir.graph import Graph
from autopipe.workload import Workload
from autopipe.workload.batches.items import shapes

OTHER_LAYERS = "let every batch have the entries of the first one, or let the first batch use the complete model"


def other_batch(own: BatchForm, part: Any, form: BatchForm) -> str:
    """Return a description of how a batch differs from that for which the stage code was generated."""
    difference = own.difference(form)
    return f"a batch of another form: {difference}" if difference else f"a batch of another shape ({shapes(part)})"


def free_sizes(graph: Graph) -> str:
    """Return which sizes may vary in a further recording, "" if none."""
    places = ", ".join(f"{symbol.input}.shape[{symbol.dimension}]" for symbol in graph.lengths)
    return f", for all batches that differ in {places}" if places else ""


def many_shapes(own: BatchForm, part: Any, form: BatchForm, count: int) -> str:
    """Return a note on the batch with which the further shapes exceed ``--max-shapes``; see ``too_many``."""
    error = too_many(own, part, form, count)
    return f"warning: {error.what}: each further one takes as long as a capture; {error.remedy}"


def too_many(own: BatchForm, part: Any, form: BatchForm, count: int) -> RunError:
    """Return the error for a batch that exceeds the limit of further shapes, naming what keeps changing.

    ``count``: the further forms and shapes for which code was generated, or would be.
    """
    remedy = "pad or group the batches so that there are fewer shapes"
    if own.difference(form):
        remedy = "let every batch have the entries and types of the first one"
    values = [path for path in own.varying(form) if not form.is_tensor(path)]
    if values:
        remedy = f"omit {values[0]} from the batch if the model does not need it"
        if not form.is_text(values[0]):
            remedy = f"give {values[0]} as a tensor, torch.tensor(value)"
        remedy += ": a Python value that forward or loss may read is a constant of the stage code"
    return RunError(
        f"{other_batch(own, part, form)}, and code was generated for {counted(count, 'shape')} already",
        remedy=f"{remedy}; or allow more with --max-shapes",
    )


class OneBatch:
    """A workload whose example is one batch of the data."""

    # the dimension of the samples was verified when the first batch was captured
    assumes_samples_first = False

    def __init__(self, workload: Workload, item: Any) -> None:
        self._workload, self._item = workload, item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def example_item(self, batch_size: int | None = None) -> Any:
        """Return the batch; if it is cut by dimensions and has too few samples, they are repeated."""
        if batch_size is None or not self._workload.cuts_by_dimension(self._item):
            return self._item
        return self._workload.resized(self._item, batch_size)

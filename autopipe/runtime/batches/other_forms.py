"""Batches of another form or shape than the one that was captured: named for people, and as an example of their own."""

from __future__ import annotations

from typing import Any

from autopipe.errors import RunError, counted
from autopipe.ir.batch import BatchForm
from autopipe.workload import Workload
from autopipe.workload.batches.items import shapes

OTHER_LAYERS = (
    "let every batch have the entries of the first one; or let the first batch be one that uses all of the model"
)


def other_batch(own: BatchForm, part: Any, form: BatchForm) -> str:
    """Say in what a batch differs from the one that the plan's own code was made for."""
    difference = own.difference(form)
    return f"a batch of another form: {difference}" if difference else f"a batch of another shape ({shapes(part)})"


def too_many(own: BatchForm, part: Any, form: BatchForm, made: int) -> RunError:
    """Return the error for a batch that would need more code than is allowed, naming what keeps changing.

    ``made``: further forms and shapes for which code was made, or would be.
    """
    remedy = "pad or group the batches so that there are fewer shapes"
    if own.difference(form):
        remedy = "let every batch have the entries and types of the first one"
    values = [path for path in own.varying(form) if not form.is_tensor(path)]
    if values:
        remedy = f"leave {values[0]} out of the batch where the model does not need it"
        if not form.is_text(values[0]):
            remedy = f"give {values[0]} as a tensor, torch.tensor(value)"
        remedy += ": a Python value that forward or loss may read is a constant of the stage code"
    return RunError(
        f"{other_batch(own, part, form)}, and code was made for {counted(made, 'shape')} already",
        remedy=f"{remedy}; or allow more with --max-shapes",
    )


class OneBatch:
    """A workload whose example is one batch that the data gave.

    ``assumes_samples_first``: which dimension counts the samples was compared when the first batch was captured.
    """

    assumes_samples_first = False

    def __init__(self, workload: Workload, item: Any) -> None:
        self._workload, self._item = workload, item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def example_item(self, batch_size: int) -> Any:
        """Return the batch, its samples repeated where there are too few."""
        fixed = self._workload.is_fixed(self._item)
        return self._item if fixed else self._workload.resized(self._item, batch_size)

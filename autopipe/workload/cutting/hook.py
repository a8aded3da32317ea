"""The ``split`` hook: the user's own way to cut a batch into microbatches."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.errors import ModelFileError, counted, with_article
from autopipe.workload.batches.items import Item, normalised
from autopipe.workload.hooks.hook import Hook


@dataclass(frozen=True, slots=True)
class Minibatch:
    """How a training asks for its minibatches, and cuts them. ``batch_size`` 0: the data's own.

    ``parts``: number of microbatches.
    """

    parts: int = 1
    batch_size: int | None = None


def split_by(hook: Hook, item: Item, parts: int) -> list[Item]:
    """Return the microbatches that the hook makes of a batch: as many as were asked for, or fewer.

    Raises: ModelFileError where the hook fails, or gives anything else.
    """
    microbatches = hook(item, parts)
    problem = ""
    if not isinstance(microbatches, (list, tuple)):
        problem = f"gave {with_article(type(microbatches).__name__)}"
    elif not 1 <= len(microbatches) <= parts:
        problem = f"gave {counted(len(microbatches), 'batch')} where {parts} were asked for"
    if problem:
        raise ModelFileError(
            f"{hook.label} {problem}",
            where=hook.place,
            remedy="return a list of as many batches as parts, each of them like a batch of data",
        )
    return [normalised(microbatch, f"{hook.label}, part {number}") for number, microbatch in enumerate(microbatches)]

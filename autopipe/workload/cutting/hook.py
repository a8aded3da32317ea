"""The ``split`` hook: the user's function that cuts a batch into microbatches."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.errors import ModelFileError, counted, with_article
from autopipe.workload.batches.items import Item, normalised
from autopipe.workload.hooks.hook import Hook


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The size and the number of parts of the minibatches of a training."""

    parts: int = 1  # number of microbatches
    batch_size: int | None = None  # None for the data's own


def split_by(hook: Hook, item: Item, parts: int) -> list[Item]:
    """Return the microbatches that the hook returns for a batch: ``parts`` of them, or fewer.

    Raises: ModelFileError if the hook fails, or returns anything else.
    """
    microbatches = hook(item, parts)
    problem = ""
    if not isinstance(microbatches, (list, tuple)):
        problem = f"returned {with_article(type(microbatches).__name__)}"
    elif not 1 <= len(microbatches) <= parts:
        problem = f"returned {counted(len(microbatches), 'batch')}, and {parts} were requested"
    if problem:
        raise ModelFileError(
            f"{hook.label} {problem}",
            where=hook.place,
            remedy="return a list of `parts` batches, each structured like a batch of the data",
        )
    return [normalised(microbatch, f"{hook.label}, part {number}") for number, microbatch in enumerate(microbatches)]

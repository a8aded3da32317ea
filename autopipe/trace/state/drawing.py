"""Refuse a data hook that changes, from batch to batch, what the forward or the loss of the same batch gives.

The source shows most of what a data hook writes (``between``). This sees the rest by trying: settings, files,
environment variables and default arguments that change only when a later batch is created.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autopipe.errors import TraceError, counted
from autopipe.trace.record.model_snapshot import buffers_restored
from autopipe.trace.state.refusal import DATA, FORWARD, INPUT

if TYPE_CHECKING:
    from autopipe.trace.state.check import Look

_MOST_ITEMS = 4
_ROUNDING = 1e-5  # of a loss; a few operations add in an order that depends on threads
_MOST_SECONDS = 2.0  # no further batch is created after this time


def refuse_later_items(look: Look) -> None:
    """Refuse a data hook if the loss of one batch changes when further batches are created.

    A forward whose loss differs from run to run anyway is refused for that. The model is restored.
    """
    workload = look.workload
    if not getattr(workload, "has_data", False):
        return
    before = _loss(look) if look.loss is None or workload.own_loss.child else look.loss
    number = _create_items(look)
    after = _loss(look)
    if torch.equal(before, after):
        return
    again = _loss(look)
    if not torch.equal(after, again):
        _refuse_unrepeatable(after, again, workload.name)
        if abs(float(before) - float(after)) <= _ROUNDING * abs(float(before)):
            return
    raise TraceError(
        f"{DATA} changes what the model computes: the loss of one batch is {float(before):.9g}, and "
        f"{float(after):.9g} after the hook creates {counted(number, 'further batch')}",
        where=workload.hooks["data"].place,
        remedy=f"do not change settings, files or other state that the forward or the loss reads; {INPUT}",
    )


def _refuse_unrepeatable(one: Tensor, other: Tensor, where: str) -> None:
    """Refuse losses of the same batch, weights and random numbers that differ by more than rounding."""
    first, second = float(one), float(other)
    if abs(first - second) > _ROUNDING * abs(first):
        raise TraceError(
            f"{FORWARD} is not repeatable: two runs with the same batch, weights and random numbers have the losses "
            f"{first:.9g} and {second:.9g}",
            where=where,
            remedy="remove what differs from run to run, such as the time, an address or the order of a set",
        )


def _create_items(look: Look) -> int:
    """Create the first batches again, and some more. Return the number of those after the first."""
    workload, number = look.workload, -1
    size = workload.num_samples(look.item) if workload.takes_batch_size else None
    end = time.monotonic() + _MOST_SECONDS
    with contextlib.suppress(Exception):  # training reports what fails in the data
        for _ in itertools.islice(workload.items(size), _MOST_ITEMS):
            number += 1
            if time.monotonic() > end:
                break
    return max(number, 0)


def _loss(look: Look) -> Tensor:
    with look.workload.own_loss.original(look.model), buffers_restored(look.model):
        return look.run(look.item)


__all__ = ["refuse_later_items"]

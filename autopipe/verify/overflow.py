"""Steps that a loss scale skips: they compare no weight, so a comparison goes on until enough steps were taken."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autopipe.verify.in_stages import fresh, overflows
from autopipe.verify.plain import PlainSettings, plain_training
from autopipe.workload import Workload

logger = logging.getLogger(__name__)

# each one halves the scale, which is 2**16 at the start
_MOST_SKIPPED = 24


def until_taken(
    workload: Workload,
    source: Iterator[Any],
    count: int,
    settings: PlainSettings,
    device: torch.device,
    last: Callable[[Any], Any],
) -> list[Any]:
    """Return the first minibatches of ``source`` of which plain training takes ``count`` steps, ``last`` of the last.

    If it takes no step, or fails, there are at least ``count`` of them.
    """
    items: list[Any] = []
    taken = 0

    def following() -> Iterator[Any]:
        while taken < count and len(items) < count + _MOST_SKIPPED:
            item = next(source)
            items.append(last(item) if taken == count - 1 else item)
            yield from fresh(items[-1:])

    def judge(step: int, parameters: Mapping[str, nn.Parameter]) -> None:
        nonlocal taken
        taken += not any(p.grad is not None and overflows(p.grad) for p in parameters.values())

    try:
        plain_training(workload, following(), settings, device=device, on_gradients=judge)
    except Exception as error:  # the comparison reports it in detail
        logger.info("plain training in float16: %s", error)
    items = items if taken else items[:count]
    return [*items, *itertools.islice(source, max(count - len(items), 0))]

"""The shares of a minibatch's parts, by the divisor that was written beside the stage files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopipe.ir.shares import Shares
from autopipe.stage import Stage


def shares_of(
    divisor: Stage | None,
    whole: Mapping[str, torch.Tensor],
    parts: Sequence[Mapping[str, torch.Tensor]],
    samples: Sequence[int],
) -> Shares:
    """Return the shares of a minibatch's parts. ``samples``: in each part. The batch lies on the CPU."""
    if divisor is None:
        return Shares.of_samples(samples)
    penalty = bool(divisor.PENALTY)
    return Shares.of(_values(divisor, whole), [_values(divisor, part) for part in parts], samples, penalty=penalty)


def _values(divisor: Stage, leaves: Mapping[str, torch.Tensor]) -> list[float]:
    """Return what each term of the loss divides by."""
    with torch.no_grad():
        values = divisor(*(leaves[name] for name in divisor.INPUTS))
    numbers = [value.item() if isinstance(value, torch.Tensor) else value for value in values]
    return [int(number) if float(number).is_integer() else float(number) for number in numbers]

"""The shares of the parts of a minibatch in its loss, by the divisor that is stored with the stage files."""

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
    """Return the shares of the parts of a minibatch on the CPU. ``samples``: of each part."""
    if divisor is None:
        return Shares.of_samples(samples)
    penalty = bool(divisor.PENALTY)
    return Shares.of(_values(divisor, whole), [_values(divisor, part) for part in parts], samples, penalty=penalty)


def shares_of_parts(
    divisors: Sequence[Stage | None], parts: Sequence[Mapping[str, torch.Tensor]], samples: Sequence[int]
) -> Shares:
    """Return the shares of parts whose tensors differ from those of the minibatch, each by the divisor of its own code.

    The divisor of the minibatch is the sum over the parts.
    """
    known = [divisor for divisor in divisors if divisor is not None]
    if len(known) < len(divisors):
        return Shares.of_samples(samples)
    each = [_values(divisor, leaves) for divisor, leaves in zip(known, parts, strict=True)]
    if len({len(values) for values in each}) > 1:
        return Shares.of_samples(samples)
    penalty = any(bool(divisor.PENALTY) for divisor in known)
    return Shares.of([sum(terms) for terms in zip(*each, strict=True)], each, samples, penalty=penalty)


def _values(divisor: Stage, leaves: Mapping[str, torch.Tensor]) -> list[float]:
    """Return the divisor of each term of the loss."""
    with torch.no_grad():
        values = divisor(*(leaves[name] for name in divisor.INPUTS))
    numbers = [value.item() if isinstance(value, torch.Tensor) else value for value in values]
    return [int(number) if float(number).is_integer() else float(number) for number in numbers]

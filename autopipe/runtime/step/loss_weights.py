"""The shares of the parts of a minibatch in its loss, by the divisor that is stored with the stage files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autopipe.ir.microbatch_loss import Shares
from autopipe.stage import Stage


@dataclass(frozen=True, slots=True)
class Divisors:
    """The divisors of a loss, one for each of its terms."""

    whole: Sequence[float]  # of the minibatch
    parts: Sequence[Sequence[float]]  # of each part
    penalty: bool  # the loss has a term that does not depend on the batch


def divisors_of(
    divisor: Stage | None, whole: Mapping[str, torch.Tensor], parts: Sequence[Mapping[str, torch.Tensor]]
) -> Divisors | None:
    """Return the divisors of a minibatch and its parts; None if these are the numbers of samples."""
    if divisor is None:
        return None
    return Divisors(_values(divisor, whole), [_values(divisor, part) for part in parts], bool(divisor.PENALTY))


def divisors_of_parts(divisors: Sequence[Stage | None], parts: Sequence[Mapping[str, torch.Tensor]]) -> Divisors | None:
    """Return those of parts whose tensors differ from those of the minibatch, each by the divisor of its own code.

    The divisor of the minibatch is the sum over the parts. None if these are the numbers of samples.
    """
    known = [divisor for divisor in divisors if divisor is not None]
    if len(known) < len(divisors):
        return None
    each = [_values(divisor, leaves) for divisor, leaves in zip(known, parts, strict=True)]
    if len({len(values) for values in each}) > 1:
        return None
    penalty = any(bool(divisor.PENALTY) for divisor in known)
    return Divisors([sum(terms) for terms in zip(*each, strict=True)], each, penalty)


def shares_of(divisors: Divisors | None, samples: Sequence[int]) -> Shares:
    """Return the shares of the parts of a minibatch. ``samples``: of each part."""
    if divisors is None:
        return Shares.of_samples(samples)
    return Shares.of(divisors.whole, divisors.parts, samples, penalty=divisors.penalty)


def _values(divisor: Stage, leaves: Mapping[str, torch.Tensor]) -> list[float]:
    """Return the divisor of each term of the loss."""
    with torch.no_grad():
        values = divisor(*(leaves[name] for name in divisor.INPUTS))
    numbers = [value.item() if isinstance(value, torch.Tensor) else value for value in values]
    return [int(number) if float(number).is_integer() else float(number) for number in numbers]

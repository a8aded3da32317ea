"""The microbatch sizes that are measured if no option names them."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.commands.trusted_code import arguments_of
from autopipe.errors import counted
from autopipe.ir.profile import COUNTED, Profile

MICROBATCH_SIZES = (1, 2, 4, 8)
COUNTED_SIZES = (1, 8)  # operations and bytes of sizes between them are interpolated: they grow with the batch
QUICK_SECONDS = 0.25  # the longest forward and backward of a size that is measured only for a large minibatch


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a command says about the microbatch sizes to measure."""

    exact: tuple[int, ...] = ()  # those that its plan will have
    batch_size: int | None = None  # of a minibatch; None for the data's own
    few: bool = False  # of a model that is counted: the sizes between are interpolated


NO_SIZES = Sizes()


def larger_sizes(batch_size: int) -> tuple[int, ...]:
    """Return the sizes to measure for a large minibatch beside MICROBATCH_SIZES, down from a quarter of it."""
    sizes, size = [], -(-batch_size // 4)
    while size > MICROBATCH_SIZES[-1]:
        sizes.append(size)
        size = -(-size // 4)
    return tuple(reversed(sizes))


def unmeasured(profile: Profile, batch_size: int) -> str:
    """Return a note if the profile has only microbatches that are small for a minibatch, or ""."""
    largest = max(profile.measurements, key=lambda measurement: measurement.microbatch_size)
    size = largest.microbatch_size
    better = [other for other in larger_sizes(batch_size) if other >= 2 * size]
    seconds = sum(cost.forward_seconds + cost.backward_seconds for cost in largest.costs.values())
    # a counted profile has no times, and larger sizes were counted as far as they are quick
    complete = profile.device.kind == COUNTED or not profile.graph.symbols
    if complete or not better or better[0] / size * seconds > QUICK_SECONDS:
        return ""
    sizes = ",".join(map(str, (*MICROBATCH_SIZES, *larger_sizes(batch_size))))
    return (
        f"no microbatch of more than {counted(size, 'sample')} was measured; larger ones may be faster for a minibatch "
        f"of {batch_size}: autopipe profile {arguments_of(profile.workload)} --microbatch-sizes {sizes}"
    )

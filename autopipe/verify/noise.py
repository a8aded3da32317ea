"""Noise: the differences between two plain loops of the same arithmetic, which rounding alone explains.

It is never taken from the run that is judged. A difference too large for rounding adds nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping

import torch

from autopipe import sparse
from autopipe.errors import counted
from autopipe.ir.rounding import NOISE_FACTOR, USUAL_FACTOR
from autopipe.trace.verify import GRADIENT_TOLERANCE
from autopipe.verify.comparison import ROUNDING_ALONE, Worst
from autopipe.verify.in_stages import Trained

# a factor of the loss that changes the rounding of every gradient, since it is not a power of two; below 1 for float16
ENLARGED = 0.75
# the most that the code of a compiler may differ from eager code by rounding, in any tensor, in one step: the tolerance
_MOST_COMPILED = {"fp32": 1e-2, "bf16": 0.1, "fp16": 0.1}
# the most that any tensor may differ in one step between two paths through the model; in fp32, as at capture
_MOST_OF_PATH = {"fp32": GRADIENT_TOLERANCE, "bf16": 0.02, "fp16": 0.02}


def noise_between(one: Trained, other: Trained, *, buffers: bool = True) -> Worst:
    """Return the differences between two plain loops. If they skip other steps, nothing is noise.

    ``buffers``: also of these, which microbatches in another order change by more than rounding.
    """
    worst = Worst()
    if one.skipped != other.skipped:
        return worst
    for key, gradient in one.gradients.items():
        worst.add_gradient(key[1], other.gradients.get(key), gradient, skipped=key[0] in one.skipped)
    for name, parameter in one.parameters.items():
        worst.add(name, other.parameters[name], parameter)
    for name, buffer in one.buffers.items() if buffers else ():
        worst.add(name, other.buffers.get(name), buffer)
    for name, values in one.states.items():
        worst.add_state(name, other.states.get(name, {}), values)
    # infinite noise would allow every difference
    worst.errors, worst.gradients, worst.states = map(finite, (worst.errors, worst.gradients, worst.states))
    return worst


def finite(errors: Mapping[str, float]) -> dict[str, float]:
    """Return the finite ones."""
    return {name: error for name, error in errors.items() if math.isfinite(error)}


def add_noise(noise: Worst, other: Worst) -> None:
    """Add another sample to ``noise``."""
    pairs = ((noise.errors, other.errors), (noise.gradients, other.gradients), (noise.states, other.states))
    for known, more in pairs:
        for name, error in more.items():
            known[name] = max(known.get(name, 0.0), error)


def noise_of_compiler(
    eager: Trained, compiled: Trained, reordered: Mapping[str, float], precision: str
) -> tuple[Worst, str]:
    """Return what a compiler changes in the plain loop, and a sentence on it. ``reordered``: see ``of_compiler``."""
    noise = noise_between(eager, compiled)
    capped = of_compiler(noise.errors, reordered, precision)
    large = sorted(name for name, error in noise.errors.items() if error > capped[name])
    median = statistics.median(noise.gradients.values()) if noise.gradients else 0.0
    text = f"the compiled plain loop differs from the eager one by {median:.1e} in the median gradient"
    for errors in (noise.errors, noise.gradients, noise.states):
        errors.update(of_compiler(errors, reordered, precision))
    return noise, text + _beyond(large, most_compiled(precision))


def most_compiled(precision: str) -> float:
    """Return the most noise of a compiler that counts: four times as much is the tolerance of a tensor."""
    return _MOST_COMPILED[precision] / NOISE_FACTOR


def usual(errors: Mapping[str, float], without: Collection[str], precision: str) -> float:
    """Return the noise of the median tensor; ``precision``: of a compiled run, "" of another.

    A tensor that a compiler changes by more than rounding must not raise the tolerance of others, and neither must a
    buffer lower it: many never change. ``without``: the buffers.
    """
    values = [error for name, error in errors.items() if name not in without]
    if precision:
        values = [error for error in values if error < most_compiled(precision)]
    median = statistics.median(values) if values else 0.0
    return min(median, _MOST_COMPILED[precision] / USUAL_FACTOR) if precision else median


def of_compiler(errors: Mapping[str, float], reordered: Mapping[str, float], precision: str) -> dict[str, float]:
    """Return what the code of a compiler may change by rounding, at most ``_MOST_COMPILED``.

    ``reordered``: what another order of sums changes. Where that leaves nothing, there is no limit.
    """
    limit = most_compiled(precision)
    return {n: e if reordered.get(n, 0.0) >= ROUNDING_ALONE else min(e, limit) for n, e in errors.items()}


def without_compiler(error: Exception) -> str:
    """Return a sentence on a plain model that a compiler does not take as a whole."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return (
        f"the model cannot be compiled as a whole ({lines[0][:200]}): the noise is that of products in parts and of "
        "another loss scale, in eager code"
    )


def noise_of_path(plain: Trained, captured: Trained, precision: str) -> tuple[Worst, str]:
    """Return what the captured path changes in the plain loop, and a sentence on it.

    Every step begins at the same weights. A difference for which a capture would be refused does not count.
    """
    difference = noise_between(plain, captured)
    limit = _MOST_OF_PATH[precision]
    large = sorted(name for name, error in difference.errors.items() if error > limit)
    for errors in (difference.errors, difference.gradients, difference.states):
        for name in large:
            errors.pop(name, None)
    text = f"the captured path differs from the model's own by {max(difference.errors.values(), default=0.0):.1e}"
    return difference, text + _beyond(large, limit)


def _beyond(large: list[str], limit: float) -> str:
    if not large:
        return ""
    return f", and in {counted(len(large), 'tensor')} such as {large[0]} by more than rounding can explain ({limit:g})"


def largest_of(tensors: Iterable[torch.Tensor | None]) -> float:
    """Return the largest finite absolute value of any tensor."""
    dense = [sparse.dense(tensor).abs() for tensor in tensors if tensor is not None and tensor.numel()]
    return max((float(t.nan_to_num(0.0, 0.0, 0.0).max()) for t in dense), default=0.0)

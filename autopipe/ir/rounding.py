"""The tolerance of comparisons whose rounding is not known: autocast, GPUs, teams, two paths (docs/semantics.md).

On a CPU in float32, results must be equal bit for bit and this module is not used. Elsewhere the plain loop runs again,
such as with its microbatches added in reverse. The difference between the two is the noise.
"""

from __future__ import annotations

# relative to a tensor's largest value
TOLERANCE = 1e-6
# the reversed order is one sample of the noise; another order may differ a few times as much
NOISE_FACTOR = 4.0
# by chance, one tensor may have little noise in that sample; it may differ as much as the others do
USUAL_FACTOR = 16.0


def allowed(usual: float, own: float = 0.0) -> float:
    """Return the relative tolerance of a tensor. ``usual``: the noise of the median tensor; ``own``: of this one."""
    return max(TOLERANCE, USUAL_FACTOR * usual, NOISE_FACTOR * own)

"""How far two computations of the same sums may differ where the order of the sums is not known: autocast, GPUs.

On a CPU in float32 nothing is allowed to differ by a bit, and none of this is applied. Elsewhere the plain loop is run
twice, once with its microbatches added up in reverse, and what that changes is the noise.
"""

from __future__ import annotations

# relative to a tensor's largest value
TOLERANCE = 1e-6
# one other order is one sample of the noise; another may be a few times as far off
NOISE_FACTOR = 4.0
# a tensor that came off lightly in that sample may be as far off as others are that did not
USUAL_FACTOR = 16.0


def allowed(usual: float, own: float = 0.0) -> float:
    """Return how far a tensor may be off. ``usual``: the noise of the median tensor; ``own``: of this one."""
    return max(TOLERANCE, USUAL_FACTOR * usual, NOISE_FACTOR * own)

"""``FirstKernels``: in which rows a rank may load kernels, so that messages go through host memory there.

CUDA loads a kernel at its first launch (CUDA C++ Programming Guide, section "Lazy Loading"). Loading can wait until
everything is complete that was started on the device. A receive over NCCL is complete when the other rank has sent.
If that rank loads a kernel, too, and has posted a receive from this one, both wait forever. So nothing waits on the
device for a message while kernels may be loaded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from autopipe.ir.schedule import ScheduleSpec
from autopipe.runtime.batches.recording import Microbatch

MINIBATCHES = 2
"""After so many, the kernels are loaded: an optimizer runs others in its second step than in its first one."""


class FirstKernels:
    """Counts the minibatches by what decides which kernels run where.

    These are the mode, the recording and the sizes of a microbatch, and the replicas that run it, which take turns. All
    ranks count the same minibatches, so they agree without a message. ``request``: of the run.
    """

    def __init__(self, request: ScheduleSpec) -> None:
        self._num_microbatches = request.num_microbatches
        self._turns = math.lcm(*(len(ranks) for ranks in request.stage_ranks))  # as in ScheduleSpec.rank_of
        self._run: Counter[tuple[Any, ...]] = Counter()

    def may_load(self, minibatches: Mapping[int, Sequence[Microbatch]], *, training: bool) -> bool:
        """Return whether any rank may load kernels in a row of these minibatches, and count them."""
        kinds = [
            {self._kind(training, number, j, part) for j, part in enumerate(parts)}
            for number, parts in minibatches.items()
        ]
        unknown = any(self._run[kind] < MINIBATCHES for each in kinds for kind in each)
        for each in kinds:
            self._run.update(each)
        return unknown

    def _kind(self, training: bool, minibatch: int, microbatch: int, part: Microbatch) -> tuple[Any, ...]:
        turn = (minibatch * self._num_microbatches + microbatch) % self._turns
        return training, turn, part.recording.name, *part.sizes.values()

"""``FirstKernels``: in which rows a rank may load kernels, so that messages go through host memory there.

CUDA loads a kernel at its first launch (CUDA C++ Programming Guide, section "Lazy Loading"). Loading can wait until
everything is complete that was started on the device. A receive over NCCL is complete when the other rank has sent.
If that rank loads a kernel, too, and has posted a receive from this one, both wait forever. So nothing waits on the
device for a message while kernels may be loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MINIBATCHES = 2
"""After so many, the kernels are loaded: an optimizer runs others in its second step than in its first one."""


@dataclass(slots=True)
class FirstKernels:
    """Counts the minibatches by what decides which kernels run: mode, recording and sizes of their microbatches.

    All ranks count the same minibatches, so they agree without a message.
    """

    _run: Counter[tuple[Any, ...]] = field(default_factory=Counter)

    def may_load(self, minibatches: Iterable[Iterable[tuple[Any, ...]]]) -> bool:
        """Return whether a row of these minibatches may load kernels, and count them.

        ``minibatches``: for each, what decides the kernels of each of its microbatches.
        """
        kinds = [set(microbatches) for microbatches in minibatches]
        unknown = any(self._run[kind] < MINIBATCHES for kind in set().union(*kinds))
        for each in kinds:
            self._run.update(each)
        return unknown

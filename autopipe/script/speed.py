"""The speed that stages of a script are predicted to have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from autopipe.cores import usable_cores
from autopipe.errors import counted

if TYPE_CHECKING:
    from autopipe.script.controller import Controller

_GAIN = 1.005  # what is shown as more than 1.00


def prediction(controller: Controller, count: int) -> str:
    """Return a sentence about the speed of ``count`` microbatches in stages, compared with one process.

    The slowest forward and the slowest backward set the pace. On this host, the stages share its cores. Each has the
    threads of the script, which uses as many cores by itself.
    """
    stages = controller.plan.stages
    forward = [stage.forward_seconds for stage in stages]
    backward = [stage.backward_seconds for stage in stages]
    one = sum(forward) + sum(backward)
    seconds = one + (count - 1) * (max(forward) + max(backward))
    cores, threads = usable_cores(), torch.get_num_threads()
    at_a_time = max(cores / threads, 1.0)
    shared = not controller.places.are_remote and count * one / at_a_time > seconds
    faster = at_a_time if shared else count * one / seconds
    if not shared:
        return f"{faster:.2f} times the speed of one process is predicted"
    why = f"{counted(len(stages), 'stage')} with {counted(threads, 'thread')} each share {counted(cores, 'core')}"
    if faster < _GAIN:
        return f"the speed of one process at most is predicted, because {why}"
    return f"{faster:.2f} times the speed of one process at most is predicted, because {why}"

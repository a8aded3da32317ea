"""Spilled: gpipe's order on one device, whose stages take turns there.

::

    rank 0 | 0F0  0F1  1F0  1F1  2F0  2F1  2B0  2B1+ 1B0  1B1+ 0B0  0B1+

``spill`` adds the copies between host and device. A stage steps right behind its last backward; with ``late`` 1, all
stages step at the end. The numbers are those of gpipe, bit for bit.

Source: Hydra, arXiv:2110.08633, with all microbatches per visit of a stage (breadth first, arXiv:2211.05953).
"""

from __future__ import annotations

from autopipe.errors import ScheduleError
from autopipe.ir.schedule import Schedule, ScheduleSpec
from autopipe.schedules.gpipe import gpipe
from autopipe.schedules.kind import Option, ScheduleKind, check_request
from autopipe.schedules.spilling.spill import spill

LATE = Option("late", 0, 0, 1, "1: all stages step at the end of the minibatch")
MESSAGES = Option("messages_on_host", 0, 0, 1, "1: what stages exchange is on the host until it is needed")
OPTIMIZER_SLABS = Option("optimizer_slabs", 2, 1, 2, "how many stages may have optimizer state on the device at a time")


def spilled(request: ScheduleSpec) -> Schedule:
    """Return the schedule. Raises: ScheduleError for an invalid request, such as one with two ranks."""
    _check(request)
    options = request.options
    return spill(gpipe(request, KIND.name), late=bool(options.get("late")), messages=bool(options.get(MESSAGES.name)))


def _check(request: ScheduleSpec) -> None:
    check_request(KIND.name, request)
    if request.num_ranks > 1:
        raise ScheduleError(
            f"spilled runs all stages on one device; given {request.num_ranks}",
            remedy="use --gpus 1, or another schedule",
        )


KIND = ScheduleKind(
    name="spilled",
    make=spilled,
    description="a model larger than its device: stages take turns on it, their weights are kept on the host; exact",
    source="Hydra, arXiv:2110.08633",
    synchronous=True,
    in_flight="all",
    example=ScheduleSpec(((0,), (0,), (0,)), 2),
    options=(LATE, MESSAGES, OPTIMIZER_SLABS),
    several_stages=True,
    replicas=False,
    check=_check,
    spills=True,
)

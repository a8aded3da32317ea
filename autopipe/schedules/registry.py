"""The schedules by name. A new one is a file of its own and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopipe.errors import ScheduleError, unknown_choice
from autopipe.ir.schedule import Schedule, ScheduleSpec
from autopipe.schedules import custom, eager_1f1b, gpipe, interleaved, one_f_one_b, pipedream, two_bw, zero_bubble
from autopipe.schedules.kind import ScheduleKind

REGISTRY: Mapping[str, ScheduleKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            gpipe.KIND,
            one_f_one_b.KIND,
            eager_1f1b.KIND,
            interleaved.KIND,
            zero_bubble.KIND,
            pipedream.KIND,
            two_bw.KIND,
            custom.KIND,
        )
    }
)


def make(name: str, request: ScheduleSpec) -> Schedule:
    """Return the schedule of that name for a request.

    Raises: ScheduleError for an unknown name or option, and for a request that the schedule cannot serve.
    """
    kind = REGISTRY.get(name)
    if kind is None:
        raise ScheduleError(unknown_choice("schedule", name, REGISTRY))
    return kind.make(kind.complete(request))

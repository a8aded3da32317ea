"""The schedules by name. To add one, write a file that defines its ``KIND``, and register it here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopipe.errors import ScheduleError, unknown_choice
from autopipe.ir.schedule import Schedule, ScheduleSpec
from autopipe.schedules import custom, eager_1f1b, gpipe, interleaved, one_f_one_b, pipedream, two_bw, zero_bubble
from autopipe.schedules.kind import ScheduleKind
from autopipe.schedules.spilling import spill

_KINDS: dict[str, ScheduleKind] = {}
REGISTRY: Mapping[str, ScheduleKind] = MappingProxyType(_KINDS)


def register(kind: ScheduleKind) -> None:
    """Register a schedule under its name, for ``--schedule``, the planner, the simulator and the runtime.

    Raises: ScheduleError if the name is taken.
    """
    if kind.name in _KINDS:
        raise ScheduleError(f"a schedule {kind.name!r} is already registered", remedy="give it another name")
    _KINDS[kind.name] = kind


register(gpipe.KIND)
register(one_f_one_b.KIND)
register(eager_1f1b.KIND)
register(interleaved.KIND)
register(zero_bubble.KIND)
register(pipedream.KIND)
register(two_bw.KIND)
register(spill.KIND)
register(custom.KIND)


def make(name: str, spec: ScheduleSpec) -> Schedule:
    """Return the schedule of that name for a spec.

    Raises: ScheduleError for an unknown name or option, and for a spec that the schedule does not support.
    """
    kind = REGISTRY.get(name)
    if kind is None:
        raise ScheduleError(unknown_choice("schedule", name, REGISTRY))
    return kind.make(kind.complete(spec))

"""The fields of the events that ranks report. An event of another host is compared with them before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopipe.errors import ArtifactError
from autopipe.ir import decoding
from autopipe.ir.schedule import Instruction


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The bytes that ``launch.rank.out_of_memory`` adds to an error."""

    predicted: int
    used: int
    requested: int
    available: int


@dataclass(frozen=True, slots=True)
class SpentSeconds:
    """What a rank spent its time on: see ``launch.rank.spent``."""

    computing: float
    waiting: float
    data: float
    saving: float
    recording: float
    ready: float
    cpu: float


_MEMORY = ("bytes", "held_bytes", "weight_bytes", "versions", "in_flight", "planned_bytes")
# kind -> field -> type, without ``kind`` and ``rank``
FIELDS: dict[str, dict[str, Any]] = {
    "ready": {"pid": int},
    "device": {"index": int, "others": int},
    "note": {"text": str},
    "complete-build": {"reason": str},
    "round": {"epoch": int, "minibatches": int},
    "other-data": {"epoch": int, "position": int, "replay": str},
    "step": {"step": int, "loss": float, "samples": int, "time": float},
    "nonfinite": {"step": int, "what": str, "place": int, "policy": str},
    "checkpoint": {"step": int, "path": str},
    "evaluating": {"step": int},
    "evaluation": {"step": int, "loss": float, "batches": int, "samples": int},
    "audit": {"step": int, "loss": float},
    "audit-left-out": {"reason": str},
    "audit-failed": {"step": int, "reason": str},
    "peak": {"stage": int, **dict.fromkeys(_MEMORY, int)},
    "copied": {"to_device": int, "to_host": int},
    "spent": {"seconds": SpentSeconds},
    "spans": {"spans": tuple[tuple[Instruction, float, float], ...]},
    "stopped": {"step": int},
    "done": {},
    "error": {
        **dict.fromkeys(("message", "where", "remedy", "instruction", "traceback"), str),
        **{"stage": int | None, "microbatch": int, "secondary": bool, "time_ns": int},
    },
    "exit": {"code": int | None, "time_ns": int},
}
# fields that an event of the kind may lack
OPTIONAL: dict[str, dict[str, Any]] = {
    "error": {"out_of_memory": OutOfMemory},
    "step": {"learning_rates": tuple[float, ...], "gradient_norm": float, "skipped": bool},
}


def problem(event: Mapping[str, Any]) -> str:
    """Return what is wrong with the fields of an event, "" if nothing is."""
    kind = event.get("kind")
    fields = FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        return f"{str(kind)[:40]!r} is not the kind of an event of a rank"
    optional = OPTIONAL.get(str(kind), {})
    for name in event:
        if name not in fields and name not in optional and name not in ("kind", "rank"):
            return f"{kind} has the unknown field {name[:40]!r}"
    for name, expected in {**fields, **optional}.items():
        if name in event:
            if not _fits(expected, event[name]):
                return f"{name!r} of {kind} is {str(event[name])[:40]!r}"
        elif name in fields:
            return f"{kind} lacks {name!r}"
    return ""


def _fits(expected: Any, value: Any) -> bool:
    if expected is str or (expected is float and isinstance(value, float)):
        return isinstance(value, expected)  # any text, and a loss that is not finite
    try:
        decoding.decode(expected, value, "")
    except ArtifactError:
        return False
    return True

"""Out of memory in a rank: the error is reported with the bytes in use and those that the plan predicted."""

from __future__ import annotations

import re
from typing import Any

import psutil
import torch

from autopipe.errors import PlanError
from autopipe.ir.plan import Plan, bytes_by_rank
from autopipe.units import in_bytes, parse_bytes

_TRIED = re.compile(r"ried to allocate (?P<size>[0-9.]+ ?(?:[KMGT]iB|bytes))")
# torch has no exception class for this on a CPU, only these texts
_MESSAGES = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory")


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _MESSAGES)


def describe_oom(error: BaseException, plan: Plan, rank: int, device: torch.device, resident: int) -> dict[str, Any]:
    """Return the fields that an out-of-memory error adds to a rank's report: a message, and figures for a new plan.

    Other errors add none. ``resident``: the memory of the process before training, which a plan does not predict.
    """
    if not is_out_of_memory(error):
        return {}
    requested = _requested_bytes(str(error))
    predicted = bytes_by_rank(plan.stages)[plan.rank_of(rank)]
    used, available = _used_and_available(device, resident)
    more = f", tried to allocate {in_bytes(requested)} more" if requested else ""
    return {
        "message": f"out of memory: the plan predicted {in_bytes(predicted)}; {in_bytes(used)} in use{more}; "
        f"{in_bytes(available)} available to this rank",
        "out_of_memory": {"predicted": predicted, "used": used, "requested": requested, "available": available},
    }


def _requested_bytes(message: str) -> int:
    """Return the bytes that torch could not allocate; 0 if its message does not say."""
    tried = _TRIED.search(message)
    try:
        return parse_bytes(tried["size"].replace("bytes", "B")) if tried else 0
    except PlanError:
        return 0


def _used_and_available(device: torch.device, resident: int) -> tuple[int, int]:
    """Return the bytes that the rank uses, and those that it could use."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        others = max(total - free - torch.cuda.memory_reserved(device), 0)
        return torch.cuda.max_memory_allocated(device), total - others
    used = max(resident_bytes() - resident, 0)
    return used, used + int(psutil.virtual_memory().available)

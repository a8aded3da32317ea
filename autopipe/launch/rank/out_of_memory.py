"""A rank that runs out of memory says what it used, against what the plan predicted."""

from __future__ import annotations

import re
from typing import Any

import psutil
import torch

from autopipe.ir.plan import Plan, bytes_by_rank
from autopipe.units import in_bytes

_TRIED = re.compile(r"ried to allocate (?P<number>[0-9.]+) ?(?P<unit>[KMGT]iB|bytes)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# what torch says on a CPU, where it has no class of its own for it
_SAID = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory")


def resident_bytes() -> int:
    """Return how much memory this process holds now."""
    return int(psutil.Process().memory_info().rss)


def is_shortage(error: BaseException) -> bool:
    """Whether an error means that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _SAID)


def told(error: BaseException, plan: Plan, rank: int, device: torch.device, resident: int) -> dict[str, Any]:
    """Return what such an error becomes in a rank's report: the message, and the figures for whoever can plan anew.

    ``resident``: the memory of the process before it did anything, which is no part of what a plan predicts.
    """
    if not is_shortage(error):
        return {}
    tried = _TRIED.search(str(error))
    asked = int(float(tried["number"]) * _UNITS[tried["unit"]]) if tried else 0
    predicted = bytes_by_rank(plan.stages)[rank]
    used, available = _used(device, resident)
    more = f", and {in_bytes(asked)} more were asked for" if asked else ""
    return {
        "message": f"out of memory: the plan predicted {in_bytes(predicted)}, {in_bytes(used)} were in use{more}; "
        f"{in_bytes(available)} are there for this rank",
        "shortage": {"predicted": predicted, "used": used, "asked": asked, "available": available},
    }


def _used(device: torch.device, resident: int) -> tuple[int, int]:
    """Return the bytes that the rank uses, and those that it could."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        others = max(total - free - torch.cuda.memory_reserved(device), 0)
        return torch.cuda.max_memory_allocated(device), total - others
    used = max(resident_bytes() - resident, 0)
    return used, used + int(psutil.virtual_memory().available)

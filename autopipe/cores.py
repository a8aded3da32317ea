"""The cores of this machine that a process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the number of cores that this process may use: by its affinity, and by the quota of its control group."""
    permitted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min([permitted, *_quotas()])))


def _quotas(root: Path = _CGROUPS, groups: Path = Path("/proc/self/cgroup")) -> Iterator[float]:
    """Yield the cores that the control groups of this process allow, as fractions; nothing without a limit."""
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            yield from _quota_of(root, name, "cpu.max")
        elif "cpu" in controllers.split(","):
            yield from _quota_of(root / "cpu", name, "cpu.cfs_quota_us", "cpu.cfs_period_us")


def _quota_of(root: Path, name: str, *files: str) -> Iterator[float]:
    """Yield the quotas of a group and of those that contain it. In a container, its own group may be the root."""
    group = root / name.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        try:
            quota, period = " ".join((folder / file).read_text(encoding="utf-8") for file in files).split()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1") and int(period):
            yield int(quota) / int(period)

"""Binds a rank to the CPUs beside its GPU, so that pinned memory and launches do not cross to another socket."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

DEVICES = Path("/sys/bus/pci/devices")
TASKS = Path("/proc/self/task")


def bind_to_device(address: str, devices: Path = DEVICES) -> tuple[int, ...]:
    """Bind all threads of this process to the CPUs that are local to a PCI device, such as ``0000:3b:00.0``.

    Threads that start later inherit it. CPUs outside of the present affinity are left out: the user's ``taskset``, or
    a cluster's launcher, permits no others.

    Returns: the CPUs; () if nothing was changed, because the kernel does not know them, or this process already runs
    on no others.
    """
    try:
        local = parse_cpus((devices / address.lower() / "local_cpulist").read_text())
    except (OSError, ValueError):
        return ()
    permitted = os.sched_getaffinity(0)
    cpus = local & permitted
    if not cpus or cpus == permitted:
        return ()
    for task in TASKS.iterdir():  # CUDA and torch have started some
        with contextlib.suppress(OSError):  # it has ended meanwhile
            os.sched_setaffinity(int(task.name), cpus)
    return tuple(sorted(cpus))


def parse_cpus(text: str) -> set[int]:
    """Read the kernel's list of CPUs, such as ``0-3,8``. Raises: ValueError."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus

"""Keep the cores from halting: on a virtual machine, a core that halts costs the next computation up to its whole time.

A process of idle priority spins on each core, in a group of processes with the smallest share of the processor.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from autopipe.workers.parent_death import die_with_parent


@contextlib.contextmanager
def cores_awake() -> Iterator[None]:
    """Spin on each core while the context lasts."""
    spinning = [_spinning(core) for core in sorted(os.sched_getaffinity(0))]
    try:
        yield
    finally:
        for process in spinning:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _spinning(core: int) -> int:
    process = os.fork()
    if process:
        return process
    try:
        die_with_parent()
        os.setsid()  # the kernel shares the processor among sessions first
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text("19")
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        os.sched_setaffinity(0, {core})
        while True:
            pass
    finally:
        os._exit(0)

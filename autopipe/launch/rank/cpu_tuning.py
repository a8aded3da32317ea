"""Reduce CPU timing noise: keep freed heap memory, and schedule the process as SCHED_BATCH.

Both were found by comparing a stage's time alone with its time in a pipeline (two ranks on two cores).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

# of malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST_FROM_HEAP = 32 << 20  # the largest value that glibc accepts on 64 bits
_KEPT = 1 << 30
_PAD = 64 << 20


def keep_freed_memory() -> None:
    """Make malloc (glibc) keep freed memory: a stage allocates and frees the same activations repeatedly.

    By default, memory freed at the end of the heap returns to the kernel and is faulted in again, page by page: a
    tenth of a small stage's time. The process keeps at most a gigabyte that it does not use.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_TOP_PAD, _PAD)


def use_batch_scheduler() -> None:
    """Make Linux schedule this process, and the threads that it will start, as SCHED_BATCH: no wakeup preempts them.

    For ranks that share cores: a rank that a message wakes would preempt one that computes, and, while it receives over
    gloo, a thread that holds the lock that it needs next. Where each rank has cores of its own, it must preempt what
    other programs run there, or it waits for a tick of the scheduler (4 ms).
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # the system's policy may forbid it; only speed depends on it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

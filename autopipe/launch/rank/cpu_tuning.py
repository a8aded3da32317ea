"""Set the memory allocator and the scheduler of a process.

What reduces noise was found by comparing a stage's time alone with its time in a pipeline (two ranks on two cores).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import Any

# of malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST_FROM_HEAP = 32 << 20  # the largest value that glibc accepts on 64 bits
_SMALLEST_ALONE = 4 << 20
_KEPT = 1 << 30
_PAD = 64 << 20


def keep_freed_memory() -> None:
    """Make malloc (glibc) keep freed memory: a stage allocates and frees the same activations repeatedly.

    By default, memory freed at the end of the heap returns to the kernel and is faulted in again, page by page: a
    tenth of a small stage's time. The process keeps at most a gigabyte that it does not use.
    """
    _set_malloc({_MMAP_THRESHOLD: _LARGEST_FROM_HEAP, _TRIM_THRESHOLD: _KEPT, _TOP_PAD: _PAD})


def return_freed_memory() -> None:
    """Return to the kernel what malloc (glibc) keeps, and from now on each freed tensor of more than 4 MiB at once.

    By default, gradients and activations of a large model lie between one another on the heap, and what is freed there
    stays: a gigabyte for a backward of 1.5 B parameters, whose gradients are freed one by one.
    """
    _set_malloc({_MMAP_THRESHOLD: _SMALLEST_ALONE})
    if (trim := _of_malloc("malloc_trim")) is not None:
        trim(0)


def _set_malloc(parameters: dict[int, int]) -> None:
    if (mallopt := _of_malloc("mallopt")) is not None:
        for parameter, value in parameters.items():
            mallopt(parameter, value)


def _of_malloc(name: str) -> Any:
    """Return a function of glibc's malloc; None where there is none."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


def use_batch_scheduler() -> None:
    """Make Linux schedule this process, and the threads that it will start, as SCHED_BATCH: no wakeup preempts them.

    For ranks that share cores: a rank that a message wakes would preempt one that computes, and, while it receives over
    gloo, a thread that holds the lock that it needs next. Where each rank has cores of its own, it must preempt what
    other programs run there, or it waits for a tick of the scheduler (4 ms).
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # the system's policy may forbid it; only speed depends on it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

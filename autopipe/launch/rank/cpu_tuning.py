"""Set the memory allocator and the scheduler of a process.

What reduces noise was found by comparing a stage's time alone with its time in a pipeline (two ranks on two cores).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

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
    for parameter, value in ((_MMAP_THRESHOLD, _LARGEST_FROM_HEAP), (_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, _PAD)):
        _call("mallopt", parameter, value)


def return_freed_memory() -> None:
    """Return to the kernel what malloc (glibc) keeps, and from now on each freed tensor of more than 4 MiB at once.

    By default, gradients and activations of a large model lie between one another on the heap, and what is freed there
    stays: a gigabyte for a backward of 1.5 B parameters, whose gradients are freed one by one.
    """
    for parameter, value in ((_MMAP_THRESHOLD, _SMALLEST_ALONE), (_TRIM_THRESHOLD, _PAD), (_TOP_PAD, _PAD)):
        _call("mallopt", parameter, value)
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    """Call a function of glibc, where it has one of this name."""
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
    if function is not None:
        function(*arguments)


def use_batch_scheduler() -> None:
    """Make Linux schedule this process, and the threads that it will start, as SCHED_BATCH: no wakeup preempts them.

    For ranks that share cores: a rank that a message wakes would preempt one that computes, and, while it receives over
    gloo, a thread that holds the lock that it needs next. Where each rank has cores of its own, it must preempt what
    other programs run there, or it waits for a tick of the scheduler (4 ms).
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # the system's policy may forbid it; only speed depends on it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

"""What makes a CPU rank's time its own: memory that stays, and a turn that lasts.

Both were found by looking for the difference between a stage's time alone and in a pipeline (two ranks on two cores).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

# of malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST_FROM_HEAP = 32 << 20  # more is refused on 64 bits
_KEPT = 1 << 30
_PAD = 64 << 20


def keep_freed_memory() -> None:
    """Let freed memory stay with the process (glibc): a stage frees and takes the same activations all the time.

    Otherwise what is freed at the end of the heap goes back to the kernel and is faulted in again, page by page: a
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
    """Ask Linux to schedule this process and the threads that it will start as a batch: no thread is cut short.

    Gloo's threads hold a lock while they take in a message. The computing thread, woken by the message before, would
    push them off the core while they hold it, and then wait for the lock: milliseconds for each receive.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a policy of the system's; only speed depends on it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

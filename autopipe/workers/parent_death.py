"""``python -m autopipe.workers.parent_death COMMAND ...``: run a command that is killed when its parent ends.

It is for a parent that starts ranks for a cluster: if that is killed, no other process would end them.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends: kill -9 of the supervisor must leave no orphan.

    The parent of a forked rank is the fork server. It outlives a command that ends before the server has called this
    function, and then forks the requested ranks. Such a rank ends here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    command = multiprocessing.parent_process()
    if command is not None and not command.is_alive():
        os._exit(1)


def allow_children() -> None:
    """Allow the user's data to start processes, as a DataLoader with workers does. They end with the rank."""
    # multiprocessing ends a daemon with its parent, and forbids it to have children
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it has no public name
    mask = functools.partial(signal.pthread_sigmask, mask={signal.SIGTERM})  # a child must not lose one
    block, unblock = functools.partial(mask, signal.SIG_BLOCK), functools.partial(mask, signal.SIG_UNBLOCK)
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=_begin_child)
    # with the start method of a script: a fork server of their own would import torch for each of them
    multiprocessing.set_start_method(None, force=True)  # None: the default of the system


def _begin_child() -> None:
    """End with the parent, and by SIGTERM, as ``Pool.terminate`` wants it; the parent leaves it to the supervisor."""
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606  # no shell is wanted

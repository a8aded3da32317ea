"""``python -m autopipe.launch.rank.parent_death COMMAND ...``: run a command that is killed when its parent ends.

It is for a parent that starts ranks for a cluster: if that is killed, no other process would end them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends: kill -9 of the supervisor must leave no orphan."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606  # no shell is wanted

"""``python -m autopipe.launch.rank.parent_death COMMAND ...``: run a command that is killed when its parent ends.

The parent is what starts ranks for a cluster: where it is killed, nobody else would end them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent goes: kill -9 of the supervisor must leave no orphan."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606  # no shell is wanted

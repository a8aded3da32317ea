"""``python -m support.simulated COMMAND ARGUMENTS``: run a command that has four simulated GPUs."""

from __future__ import annotations

import os
import sys

from .library import environment, missing

if __name__ == "__main__":
    if reason := missing():
        raise SystemExit(reason)
    os.execvpe(sys.argv[1], sys.argv[1:], environment(AUTOPIPE_SHARED_GPU="host"))

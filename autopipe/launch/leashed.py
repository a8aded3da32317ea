"""``python -m autopipe.launch.leashed COMMAND ...``: become the command, which is killed when its parent goes.

The parent is what starts ranks for a cluster: where it is killed, nobody else would end them.
"""

from __future__ import annotations

import os
import sys

from autopipe.launch.entry import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606  # no shell is wanted

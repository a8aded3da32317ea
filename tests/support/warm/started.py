"""``PROGRAM ARGUMENTS``: a command as a user starts it, which waits less (``brief``)."""

import runpy
import sys
from pathlib import Path

import brief  # beside this file, which is run as a script

program, *arguments = sys.argv[1:]
brief.shorten(setattr)
sys.argv = [program, *arguments]
sys.path[0] = str(Path(program).parent)
runpy.run_path(program, run_name="__main__")

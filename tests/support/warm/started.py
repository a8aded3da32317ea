"""``PROBE PROGRAM ARGUMENTS``: a command as a user starts it, which waits less (``brief``).

``PROBE``: the command of the process that reads its data (``reading``), as JSON.
"""

import json
import runpy
import sys
from pathlib import Path

import brief  # beside this file, which is run as a script

from autopipe.commands.training import repeating

probe, program, *arguments = sys.argv[1:]
repeating.probe_command = lambda: json.loads(probe)
brief.shorten(setattr)
sys.argv = [program, *arguments]
sys.path[0] = str(Path(program).parent)
runpy.run_path(program, run_name="__main__")

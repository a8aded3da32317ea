"""A process that the fork server forks after its command has ended."""

import subprocess
import sys

SCRIPT = """
import multiprocessing
import os
import time
from multiprocessing import forkserver

from autopipe.workers.parent_death import die_with_parent

def rank():
    multiprocessing.parent_process().join()
    die_with_parent()
    time.sleep(1000)

if __name__ == "__main__":
    forkserver.read_signed = lambda status: os._exit(0)  # the command ends while it waits for the server's answer
    multiprocessing.get_context("forkserver").Process(target=rank).start()
"""


def test_a_process_of_an_ended_command_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # every process holds the output open while it runs
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")

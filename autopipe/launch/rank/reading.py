"""The entry point of a process that the fork server of the ranks forks to read data, as a rank does."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection

from autopipe.launch.rank.parent_death import allow_children, die_with_parent
from autopipe.launch.rank.signals import leave_signals_to_supervisor
from autopipe.workload.batches import probe


def read_data(task: Connection, answer: Connection) -> None:
    """Run ``workload.batches.probe`` with these pipes as its standard input and output."""
    die_with_parent()
    os.setsid()  # it is ended together with the processes that the user's data starts
    leave_signals_to_supervisor()
    allow_children()
    nothing = os.open(os.devnull, os.O_WRONLY)
    for standard, descriptor in enumerate((task.fileno(), answer.fileno(), nothing)):
        os.dup2(descriptor, standard)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    probe.main()

"""The fork server of the ranks, forked from this process instead of started: it need not import torch again.

``fork_early`` is for a command that has imported torch and has not used it yet: there are no threads, no GPU contexts
and no open files for the ranks to inherit. ``forked.preload`` starts a new process in all other cases, such as a script
that uses ``autopipe.Pipeline``, and if the forked server ends.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import socket
import sys
import threading
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import NoReturn

from autopipe.launch.rank.forked import FORK_SERVER, fork_server_runs, prepare_fork_server
from autopipe.launch.rank.parent_death import die_with_parent
from autopipe.launch.rank.signals import stop_signals_blocked
from autopipe.launch.rank.title import find_arguments, set_title

_TITLE = "autopipe forkserver"


def fork_early() -> None:
    """Fork the server from this process. Call it before torch computes anything.

    It is not forked on a system other than Linux, beside other threads or a GPU context, or by a version of Python with
    another protocol of the server.
    """
    arguments = find_arguments()
    if arguments is None or sys.version_info >= (3, 14) or fork_server_runs():
        return
    from autopipe.launch.rank.deferred import defer

    defer()  # in the ranks
    from autopipe.launch.rank import worker  # noqa: F401  # for the forked processes

    gc.freeze()  # what is imported stays: no process reads it again, and copies its pages, to find garbage
    if not may_fork():
        return
    prepare_fork_server()
    flush_streams()
    parent = os.getpid()
    with socket.socket(socket.AF_UNIX) as listener, stop_signals_blocked():
        address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]  # it has no public name
        listener.bind(address)
        Path(address).chmod(0o600)
        listener.listen()
        alive, ours = os.pipe()  # the server ends when the other end is closed
        try:
            pid = os.fork()
        except OSError:  # too many processes, or too little memory, at the moment
            os.close(alive)
            os.close(ours)
            Path(address).unlink()
            return
        if pid == 0:
            os.close(ours)
            _serve(listener.detach(), alive, parent, arguments)
        os.close(alive)
    FORK_SERVER._forkserver_address, FORK_SERVER._forkserver_alive_fd, FORK_SERVER._forkserver_pid = address, ours, pid


def may_fork() -> bool:
    """Return whether a forked process is as good as a new one: beside other threads or a GPU context, it is not."""
    import torch

    return threading.active_count() == 1 and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def flush_streams() -> None:
    """Write what is buffered, before a fork: each forked process would print it, too."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader may be gone
            stream.flush()


def _serve(listener: int, alive: int, parent: int, arguments: tuple[int, int]) -> NoReturn:
    """Serve the requests for ranks in the forked process, until its parent ends."""
    try:
        die_with_parent()
        if os.getppid() == parent:
            atexit.unregister(shutil.rmtree)  # the parent's folder of sockets
            gc.enable()  # the parent disables it for its imports
            set_title(_TITLE, arguments)
            forkserver.main(listener, alive, [])
    finally:
        os._exit(0)

"""The fork server of this process: it has imported torch, so that each process that it forks starts at once.

Ranks, audits, measurements and the jobs of a sweep are forked from it. A process that uses a GPU is, too: the server
never touches one, and neither does the command.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from typing import Any

from autopipe.errors import RunError
from autopipe.workers.signals import stop_signals_blocked

FORK_SERVER: Any = forkserver._forkserver  # it has no public name
# for a killed process to end: its GPU's driver releases the memory first
END_SECONDS = 15.0
# what the server imports
MODULES = ["autopipe.launch.rank.fork_server_preload"]
# a socket's path holds 107 bytes, and multiprocessing's own names take up to 40 of them
_LONGEST_FOLDER = 60
_STARTS = 20
_START_PAUSE_SECONDS = 0.05


def preload(also: Sequence[str] = ()) -> None:
    """Start the fork server, which imports torch in the background, unless it runs.

    It ignores the signals that request the end of a run: this process handles them. ``also``: further modules that it
    imports, and a later server of this process, too.

    Raises: RunError if there is no folder for its socket.
    """
    MODULES.extend(name for name in also if name not in MODULES)
    _shorten_socket_paths()
    multiprocessing.get_context("forkserver").set_forkserver_preload(MODULES)
    with stop_signals_blocked():
        resource_tracker.ensure_running()  # which unblocks two of them in this process afterwards
    with stop_signals_blocked():
        forkserver.ensure_running()


def fork(
    function: Callable[..., None], arguments: tuple[Any, ...], *, name: str, imports_main: bool = True
) -> ForkServerProcess:
    """Fork a process that calls a function of a module. If the fork server ends meanwhile, start another.

    The process has the environment of this one, also where it differs from that of the fork server's start; libraries
    that torch loads have read theirs by then. ``imports_main``: whether it imports the calling script first, which may
    define the model.

    Raises: RunError if the process cannot be started.
    """
    for _ in range(_STARTS):
        preload()
        process = multiprocessing.get_context("forkserver").Process(
            target=_run, args=(dict(os.environ), function, arguments), name=name, daemon=True
        )
        try:
            with contextlib.nullcontext() if imports_main else _without_main():
                process.start()
        except (EOFError, ConnectionError):
            time.sleep(_START_PAUSE_SECONDS)  # until the kernel reports its end
        except OSError as error:
            raise RunError(f"no process can be started for {name}: {error}") from error
        else:
            return process
    raise RunError(
        f"the process that others are forked from ended {_STARTS} times before this one started: {name}",
        remedy="check whether the machine is short of memory or of processes (ulimit -u)",
    )


def fork_here(function: Callable[..., None], arguments: tuple[Any, ...]) -> BaseProcess:
    """Fork a process from this one, which must have no other thread. The kernel ends it with this one.

    It has the name of this process, which tells the user's code the rank.

    Raises: RunError if the process cannot be started.
    """
    name = multiprocessing.current_process().name
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments, name=name, daemon=True)
    try:
        process.start()
    except OSError as error:
        raise RunError(f"no process can be started beside {name}: {error}") from error
    return process


def _run(environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)


def end_fork_server() -> None:
    """End the fork server, if it runs. Its successor has another seed of string hashes."""
    with stop_signals_blocked():
        FORK_SERVER._stop()


def death(code: int | None) -> str:
    """Describe how a process ended. ``code``: its exit code, below 0 for the number of a signal."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = " (kill -9, or the kernel ran out of memory)" if name == "SIGKILL" else ""
        return f"the process was killed by {name}{hint}"
    return f"the process exited with code {code} before it was finished"


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Let multiprocessing find no script that a process that is started now would import."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _shorten_socket_paths() -> None:
    """Make multiprocessing create its sockets in a directory with a short path, if TMPDIR is too long for them.

    Raises: RunError if no such directory exists.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # it has no public name
    if config.get("tempdir") is not None or len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_FOLDER:
        return
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):  # noqa: S108  # mkdtemp creates a private directory in it
        with contextlib.suppress(OSError):
            config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir=folder)
            atexit.register(shutil.rmtree, config["tempdir"], ignore_errors=True)
            return
    raise RunError(
        f"the path of the folder for temporary files is too long for a socket ({_LONGEST_FOLDER} bytes at most)",
        where=f"TMPDIR={tempfile.gettempdir()}",
        remedy="set TMPDIR to a folder with a shorter path",
    )

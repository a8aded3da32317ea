"""Run code as at a later step, without the effects of that step on files, in limited time and memory.

At a later step a model may save a checkpoint, delete an old one, or stop. These runs must not: their weights are
not those of that step. What a package does by other means (a library in C that writes a file, a socket) happens.

A module that is first imported in such a run keeps the functions that it imports from others. So these call the
original functions after the run.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import io
import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import psutil
import torch

from autopipe.users_code import is_model_file
from autopipe.workload.model.size_limits import available_bytes

_EVERY = 0.02  # seconds between two attempts to interrupt a run
_MORE_BYTES = 1 << 30
_OPEN = open
_OPEN_DESCRIPTOR = os.open
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES: tuple[tuple[Any, str], ...] = (
    *((os, name) for name in ("remove", "unlink", "rename", "renames", "replace", "truncate", "rmdir", "removedirs")),
    *((os, name) for name in ("mkdir", "makedirs", "mkfifo", "link", "symlink", "chmod", "chown", "utime", "chdir")),
    *((os, name) for name in ("kill", "killpg", "system")),
    *((shutil, name) for name in ("rmtree", "move", "copyfile", "copytree")),
    (torch, "save"),
    *((subprocess, name) for name in ("run", "call", "check_call", "check_output")),
)
"""Functions that do nothing in an isolated run."""
_ENDS = (*(name for name in dir(os) if name.startswith("exec")), "_exit", "abort")
"""Functions of ``os`` that end an isolated run, rather than the process."""


class OutOfTime(BaseException):
    """A run took too long. Not an ``Exception``, so that the user's code does not catch it."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Run a block without warnings, with a part of the available memory.

    Raises: OutOfTime in the block, in a function of the user or of a package, after ``seconds``. Only the main thread
    can be interrupted; in other threads a block takes as long as it takes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _memory_limit(), _time_limit(seconds):  # the latter ends first: what restores the rest is not interrupted
            yield


@contextlib.contextmanager
def without_writes() -> Iterator[None]:
    """Discard changes of files of this thread, and start no processes. Files are read as usual."""
    with contextlib.ExitStack() as stack:
        for owner in (builtins, io):
            stack.enter_context(replaced(owner, "open", _open_to_read))
        stack.enter_context(replaced(os, "open", _descriptor_to_read))
        stack.enter_context(replaced(subprocess.Popen, "__init__", _start_nothing))
        for owner, name in _CHANGES:
            stack.enter_context(replaced(owner, name, _nothing))
        for name in _ENDS:
            stack.enter_context(replaced(os, name, _end))
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a module or class for this thread, until the block ends."""
    before, thread = getattr(owner, name), _own_thread()

    @functools.wraps(before)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (value if _own_thread() == thread else before)(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        thread = (0, 0)
        setattr(owner, name, before)


def _own_thread() -> tuple[int, int]:
    """Return what identifies this thread, also in a process that it forks, such as a worker of a ``DataLoader``."""
    return os.getpid(), threading.get_ident()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _end(*args: Any, **kwargs: Any) -> NoReturn:
    """End the run."""
    raise SystemExit


def _start_nothing(process: Any, args: Any, *others: Any, **options: Any) -> None:
    """Initialize a ``subprocess.Popen`` as a process that has ended and has written nothing."""
    options.update(zip(("bufsize", "executable", "stdin", "stdout", "stderr"), others, strict=False))
    kind = io.StringIO if any(map(options.get, ("text", "universal_newlines", "encoding", "errors"))) else io.BytesIO
    process.args, process.pid, process.returncode, process._child_created = args, 0, 0, False
    for name in ("stdin", "stdout", "stderr"):
        setattr(process, name, kind() if options.get(name) == subprocess.PIPE else None)
    process.communicate = lambda *_, **__: tuple(
        stream and kind().read() for stream in (process.stdout, process.stderr)
    )


def _descriptor_to_read(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
    """Open a file, or the null device for writing."""
    if flags & _WRITING:
        return _OPEN_DESCRIPTOR(os.devnull, flags & os.O_ACCMODE)
    return _OPEN_DESCRIPTOR(path, flags, *args, **kwargs)


def _open_to_read(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """Open a file, or the null device for writing."""
    if set(mode) & set("wax+") and not isinstance(file, int):
        file, mode = os.devnull, mode.replace("x", "w")
    return _OPEN(file, mode, *args, **kwargs)


@contextlib.contextmanager
def _memory_limit() -> Iterator[None]:
    """Let an allocation fail that would take much more memory than this process ever used."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    limit = int(psutil.Process().memory_info().vms) + min(available_bytes(), most) + _MORE_BYTES
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    with contextlib.suppress(OSError, ValueError):  # a system without such limits
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block after ``seconds``, where it runs a function of the user or of a package.

    Functions of torch and of autopipe are not interrupted: they may hold a lock or be changing global state. A loop
    that catches every exception (``except: pass``) is interrupted at one of its lines outside of the ``try``.
    """
    handler = signal.getsignal(signal.SIGALRM)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return

    traced: list[types.FrameType] = []
    attempts, tracing = itertools.count(1), sys.gettrace()

    def interrupt(_: int, frame: types.FrameType | None) -> None:
        if frame is None or not is_model_file(frame.f_code.co_filename):
            return
        if next(attempts) % 2:
            raise OutOfTime
        sys.settrace(_interrupt_line)  # an exception from it ends the tracing
        outer: types.FrameType | None = frame
        while outer is not None:
            if is_model_file(outer.f_code.co_filename):
                outer.f_trace = _interrupt_line
                traced.append(outer)
            outer = outer.f_back

    remaining, interval = signal.getitimer(signal.ITIMER_REAL)
    start = time.monotonic()
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, _EVERY)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if traced:
            sys.settrace(tracing)
        for frame in traced:
            frame.f_trace = None
        if remaining:  # an alarm of someone else, which was pending
            signal.setitimer(signal.ITIMER_REAL, max(remaining - (time.monotonic() - start), 0.001), interval)


def _interrupt_line(frame: types.FrameType, event: str, _: Any) -> Any:
    """Raise OutOfTime at a line that no ``try`` of the function surrounds: a trace function."""
    code, place = frame.f_code, frame.f_lasti
    if event != "line" or not is_model_file(code.co_filename):
        return _interrupt_line
    handlers: Any = dis.Bytecode(code)
    if any(handler.start <= place < handler.end for handler in handlers.exception_entries):
        return _interrupt_line
    raise OutOfTime


__all__ = ["OutOfTime", "limited", "replaced", "without_writes"]

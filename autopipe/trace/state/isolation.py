"""Run code as at a later step, without the effects of that step on output and files, in limited time and memory.

At a later step a model may save a checkpoint, delete an old one, print, or stop. These runs must not: their weights are
not those of that step. What a package does by other means (a library in C that writes a file, a socket) happens.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
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
from typing import Any

import psutil
import torch

from autopipe.trace.state.observe import is_users_file
from autopipe.workload.model.size_limits import available_bytes

_EVERY = 0.02  # seconds between two attempts to interrupt a run
_MORE_BYTES = 1 << 30
_OPEN = open
_CHANGES: tuple[tuple[Any, str], ...] = (
    *((os, name) for name in ("remove", "unlink", "rename", "replace", "rmdir", "truncate", "kill", "system")),
    *((shutil, name) for name in ("rmtree", "move", "copyfile", "copytree")),
    (torch, "save"),
    *((subprocess, name) for name in ("run", "call", "check_call", "check_output")),
)
"""Functions that do nothing in an isolated run."""


class OutOfTime(BaseException):
    """A run took too long. Not an ``Exception``, so that the user's code does not catch it."""


@contextlib.contextmanager
def isolated(seconds: float) -> Iterator[None]:
    """Run a block without output and changes of files, with a part of the available memory.

    Raises: OutOfTime in the block, in a function of the user or of a package, after ``seconds``. Only the main thread
    can be interrupted; in other threads a block takes as long as it takes.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_without_effects())
        stack.enter_context(_memory_limit())
        stack.enter_context(_time_limit(seconds))  # the first to end: what restores the rest is not interrupted
        yield


@contextlib.contextmanager
def _without_effects() -> Iterator[None]:
    """Discard output, log records and changes of files of this thread. Files are read as usual."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(_Muted(sys.stdout)))
        stack.enter_context(contextlib.redirect_stderr(_Muted(sys.stderr)))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for owner in (builtins, io):
            stack.enter_context(_replaced(owner, "open", _open_to_read))
        for owner, name in _CHANGES:
            stack.enter_context(_replaced(owner, name, _nothing))
        stack.enter_context(_replaced(logging.Logger, "handle", _nothing))
        yield


class _Muted:
    """A stream that discards what this thread writes, and passes on what other threads write."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Write a text, unless this thread does."""
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a module or class for this thread."""
    before, thread = getattr(owner, name), threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (value if threading.get_ident() == thread else before)(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


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

    Functions of torch and of autopipe are not interrupted: they may hold a lock or be changing global state.
    """
    handler = signal.getsignal(signal.SIGALRM)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return

    def interrupt(_: int, frame: types.FrameType | None) -> None:
        if frame is not None and is_users_file(frame.f_code.co_filename):
            raise OutOfTime

    remaining, interval = signal.getitimer(signal.ITIMER_REAL)
    start = time.monotonic()
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, _EVERY)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:  # an alarm of someone else, which was pending
            signal.setitimer(signal.ITIMER_REAL, max(remaining - (time.monotonic() - start), 0.001), interval)


__all__ = ["OutOfTime", "isolated"]

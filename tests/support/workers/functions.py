"""Functions that tests run in another process, as commands run measurements."""

from __future__ import annotations

import ctypes
import logging
import math
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import torch

from autopipe.errors import TraceError
from autopipe.workers.task import Link


def report(task: Any, link: Link) -> Any:
    """Send messages, and return what the process is."""
    link.progress("measuring", 0.5)
    link.ask("captured", graph="of the model")
    logging.getLogger("autopipe.measure").warning("size %d is left out", 1)
    logging.getLogger("autopipe.measure").debug("a detail")
    place = {"pid": os.getpid(), "folder": str(Path.cwd()), "threads": torch.get_num_threads()}
    weighed = os.getsid(0) == os.getsid(os.getppid())  # Linux weighs processes of low priority within their session
    return {"task": task, "nan": math.nan, **place, "set": os.environ.get("SET_LATER"), "weighed": weighed}


def fail(task: Any, link: Link) -> Any:
    """Raise the error that the task names."""
    if task == "user":
        return task.missing
    if task == "trace":
        error = TraceError("cannot be captured", where="net.py:3", remedy="write it differently")
        error.within = ("block", "attention")
        raise error
    if task == "disk":
        raise OSError(28, "No space left on device", "/full/profile.json")
    if task == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if task == "exit":
        raise SystemExit("bye")
    return link.send("value", value=link)


def die(task: Any, link: Link) -> Any:
    """End without a result: killed, or with the exit code of the task."""
    if task is None:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(task)


def wait(task: Any, link: Link) -> Any:
    """Start a process, report both, and wait forever."""
    child = os.fork()
    if child:
        link.send("running", pids=[os.getpid(), child])
    while True:
        signal.pause()


def leave(task: Any, link: Link) -> Any:
    """Start a process that does not end with its parent, report it, and end without a result."""
    ready, begun = os.pipe()
    child = os.fork()
    if child:
        os.read(ready, 1)
        link.send("running", pids=[child])
        os._exit(task)
    ctypes.CDLL(None).prctl(1, 0)  # PR_SET_PDEATHSIG
    os.write(begun, b".")
    while True:
        signal.pause()


def end_child(task: Any, link: Link) -> Any:
    """Fork a process that waits, end it as a ``multiprocessing.Pool`` does, and return how it ended."""
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()
    child.terminate()
    child.join(task["seconds"])
    code = child.exitcode
    child.kill()
    return code

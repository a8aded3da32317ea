"""``RankServer``: a process, forked before the script begins, from which the ranks are forked.

A rank that is started as a new process of Python imports torch again, which takes longer than everything else up to its
first command. The server has torch, and nothing of the script: a rank that it forks is as clean as a new process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from autopipe.launch.rank.deferred import defer
from autopipe.launch.rank.parent_death import die_with_parent
from autopipe.launch.rank.title import find_arguments, set_title
from autopipe.script.rank.serve import main

_NUMBER = struct.Struct("i")
_MOST_BYTES = 1 << 16  # of a request
_ANSWER_SECONDS = 60.0
# of variables that libraries read when they are loaded
_AT_LOAD = re.compile(
    "(ATEN|CUDA|CUBLAS|CUDNN|DNNL|GLIBC|GOMP|KMP|LD|MALLOC|MKL|NCCL|NVIDIA|OMP|ONEDNN|PYTORCH|TORCH)_|PYTHON"
)


class RankProcess:
    """The process of a rank, with the methods of ``subprocess.Popen`` that its owner needs."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        """``status``: where the server sends the exit code. Its end without one means that the server was killed."""
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. ``timeout``: in seconds. Raises: subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                code = self._status.recv(_NUMBER.size)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0) from None
            self.returncode = _NUMBER.unpack(code)[0] if len(code) == _NUMBER.size else -signal.SIGKILL
            self._status.close()
        return self.returncode

    def kill(self) -> None:
        """End the process at once, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class RankServer:
    """The server, from the side of the process that the script runs in."""

    def __init__(self, pid: int, end: socket.socket) -> None:
        self.pid, self._end, self._owner = pid, end, os.getpid()
        self._inode = os.fstat(end.fileno()).st_ino
        self._environment = dict(os.environ)

    @classmethod
    def forked(cls) -> RankServer | None:
        """Fork the server; None where a forked process is not as good as a new one.

        Call it before torch computes anything: beside other threads or a GPU context, nothing is forked.
        """
        if sys.platform != "linux" or threading.active_count() > 1 or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        arguments = find_arguments()
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError:  # Linux before 5.3
            return None
        if arguments is None:
            return None
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # its reader may be gone
                stream.flush()  # or each rank would print what is buffered
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:  # too many processes, or too little memory, at the moment
            here.close()
            there.close()
            return None
        if pid == 0:
            here.close()
            try:
                die_with_parent()
                if os.getppid() == parent:
                    _serve(there, arguments)
            finally:
                os._exit(0)
        there.close()
        return cls(pid, here)

    def start(self, words: Sequence[str], end: socket.socket) -> RankProcess | None:
        """Fork a rank. ``words``: the arguments of ``serve.main`` that follow the descriptor of the socket ``end``.

        None if the rank must be a new process: the script has changed a variable of the environment that libraries read
        when they are loaded, or the server has ended.
        """
        if not self._is_ours():
            return None
        now, before = dict(os.environ), self._environment
        changed = {name: now.get(name) for name in now.keys() | before.keys() if now.get(name) != before.get(name)}
        if any(map(_AT_LOAD.match, changed)):
            return None
        state = {"folder": str(Path.cwd()), "environment": changed, "cores": sorted(os.sched_getaffinity(0))}
        request = json.dumps({"words": list(words), **state}).encode()
        here, there = socket.socketpair()
        with there:
            try:
                self._end.settimeout(_ANSWER_SECONDS)
                socket.send_fds(self._end, [request], [end.fileno(), there.fileno(), 2])
                answer = self._end.recv(_NUMBER.size)
            except OSError:
                answer = b""
        if len(answer) != _NUMBER.size:
            here.close()
            return None
        return RankProcess(_NUMBER.unpack(answer)[0], here)

    def _is_ours(self) -> bool:
        """Return whether this process forked the server, and has its socket: a script may close all files."""
        try:
            return os.getpid() == self._owner and os.fstat(self._end.fileno()).st_ino == self._inode
        except OSError:
            return False

    def close(self) -> None:
        """End the server. Its ranks end with it. Does nothing in a forked process."""
        if not self._is_ours():
            return
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # also if a process of the script has a copy of it
        self._end.close()
        with contextlib.suppress(ChildProcessError):  # the script has waited for all its processes
            os.waitpid(self.pid, 0)


def _serve(requests: socket.socket, arguments: tuple[int, int]) -> None:
    """Fork the requested ranks, and report how they ended, until the socket is closed."""
    set_title("autopipe.script.rank server", arguments)
    defer()
    gc.freeze()  # what is imported stays: no rank copies its pages to find garbage
    gc.enable()
    os.setsid()  # Ctrl-C reaches the process of the script only
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        running: dict[int, tuple[int, int]] = {}  # a descriptor of a rank's process -> its number, and where to report
        while True:
            for key, _ in selector.select():
                if key.fd != requests.fileno():
                    _report(key.fd, *running.pop(key.fd))
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    continue
                text, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 3)
                if not text:
                    return
                try:
                    pid = os.fork()
                except OSError:  # too many processes, or too little memory, at the moment
                    for descriptor in descriptors:
                        os.close(descriptor)
                    requests.send(b"")
                    continue
                if pid == 0:
                    requests.close()
                    for _, status in running.values():
                        os.close(status)
                    _become_rank(json.loads(text), arguments, *descriptors)
                end, status, errors = descriptors
                os.close(end)
                os.close(errors)
                watched = os.pidfd_open(pid)
                running[watched] = pid, status
                selector.register(watched, selectors.EVENT_READ)
                requests.send(_NUMBER.pack(pid))


def _report(watched: int, pid: int, status: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):  # its reader may be gone
        os.write(status, _NUMBER.pack(code))
    os.close(status)


def _become_rank(request: dict[str, Any], arguments: tuple[int, int], end: int, status: int, errors: int) -> NoReturn:
    """Serve as a rank in the forked process."""
    try:
        rank, count, _, *others = request["words"]
        set_title(f"autopipe.script.rank {rank}", arguments)
        os.close(status)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(errors, 1)  # standard output belongs to the script
        os.dup2(errors, 2)
        os.close(nothing)
        os.close(errors)
        os.chdir(request["folder"])
        os.sched_setaffinity(0, request["cores"])
        for name, value in request["environment"].items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        main([str(end), rank, count, str(os.getppid()), *others])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)

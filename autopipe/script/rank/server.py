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
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from autopipe.script.rank.serve import main

_NUMBER = struct.Struct("i")
_MOST_BYTES = 1 << 16  # of a request
_ANSWER_SECONDS = 60.0
# of variables that libraries read when they are loaded
_AT_LOAD = re.compile(
    "(ATEN|BLIS|CUDA|CUBLAS|CUDNN|DNNL|GLIBC|GOMP|GOTO|HIP|HSA|KMP|LD|MALLOC|MIOPEN|MKL|NCCL|NVIDIA|OMP|ONEDNN|OPENBLAS"
    "|PYTORCH|ROCBLAS|TORCH)_|PYTHON"
)


class RankProcess:
    """The process of a rank, with the methods of ``subprocess.Popen`` that its owner needs."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        """``status``: where the server sends the exit code. Its end without one means that the server was killed."""
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._handle: int | None = None  # None: the process has ended
        with contextlib.suppress(OSError):
            self._handle = os.pidfd_open(pid)

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
            self._status.close()
            if len(code) != _NUMBER.size:  # it ends with the server, soon
                self.kill()
            self.returncode = _NUMBER.unpack(code)[0] if len(code) == _NUMBER.size else -signal.SIGKILL
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        return self.returncode

    def kill(self) -> None:
        """End the process at once, if it runs."""
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class RankServer:
    """The server, from the side of the process that the script runs in."""

    def __init__(self, end: socket.socket) -> None:
        """``end``: a socket on which the server has sent its process id. Raises: OSError if it has not."""
        end.settimeout(_ANSWER_SECONDS)
        answer = end.recv(_NUMBER.size)
        if len(answer) != _NUMBER.size:
            raise OSError("the server did not start")
        self.pid = _NUMBER.unpack(answer)[0]
        self._end, self._owner, self._inode = end, os.getpid(), os.fstat(end.fileno()).st_ino
        self._environment, self._inherited = dict(os.environ), _inherited()

    @classmethod
    def forked(cls) -> RankServer | None:
        """Fork the server; None where a forked process is not as good as a new one.

        Call it before torch computes anything: beside other threads or a GPU context, nothing is forked. The server is
        not a child of this process: a script may wait for all its children.
        """
        if sys.platform != "linux" or threading.active_count() > 1 or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        for stream in (sys.stdout, sys.stderr):  # each forked process would print what is buffered, too
            with contextlib.suppress(OSError, ValueError):  # its reader may be gone
                stream.flush()
        try:
            owner = os.pidfd_open(os.getpid())
        except OSError:  # Linux before 5.3
            return None
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = os.fork()
            if pid == 0:
                try:
                    if os.fork() == 0:
                        _serve(there, owner)
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
            there.close()
            return cls(here)
        except OSError:  # too many processes, or too little memory, at the moment
            here.close()
            return None
        finally:
            there.close()
            os.close(owner)

    def start(self, words: Sequence[str], end: socket.socket) -> RankProcess | None:
        """Fork a rank. ``words``: the arguments of ``serve.main`` that follow the descriptor of the socket ``end``.

        None if the rank must be a new process: the script has changed a variable of the environment that libraries read
        when they are loaded, or a limit that processes inherit; or the server has ended.
        """
        if not self._is_ours() or _inherited() != self._inherited:
            return None
        now, before = dict(os.environ), self._environment
        changed = {name: now.get(name) for name in now.keys() | before.keys() if now.get(name) != before.get(name)}
        if any(map(_AT_LOAD.match, changed)):
            return None
        state = {"folder": str(Path.cwd()), "environment": changed}
        request = json.dumps({"words": list(words), **state}).encode()
        if len(request) > _MOST_BYTES:
            return None
        here, there = socket.socketpair()
        with there:
            try:
                socket.send_fds(self._end, [request], [end.fileno(), there.fileno(), 2])
                answer = self._end.recv(_NUMBER.size)
            except OSError:  # its late answer would be taken for that to the next request
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                self._end.close()
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
        """End the server, and return when it has ended. Its ranks end with it. Does nothing in a forked process."""
        if self._is_ours():
            with contextlib.suppress(OSError):
                self._end.shutdown(socket.SHUT_WR)  # also if a process of the script has a copy of it
                self._end.recv(_NUMBER.size)
            self._end.close()


def _inherited() -> tuple[Any, ...]:
    """Return what a new process would inherit from this one, other than its environment and its folder."""
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name[:7] == "RLIMIT_"}
    priority = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.sched_getaffinity(0)
    mask = os.umask(0o077)
    os.umask(mask)
    return limits, priority, mask


def _serve(requests: socket.socket, owner: int) -> None:
    """Fork the requested ranks, and report how they ended, until the socket is closed, or its owner has ended.

    ``owner``: a descriptor of the process of the script.
    """
    os.setsid()  # Ctrl-C reaches the process of the script only
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the exit codes of ranks are read
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # a reader of what the script writes must see its end
        os.dup2(nothing, descriptor)
    _close_all_but({requests.fileno(), owner})
    requests.send(_NUMBER.pack(os.getpid()))
    import torch._dynamo  # noqa: F401  # each optimizer imports it in its first step

    gc.freeze()  # what is imported stays: no rank copies its pages to find garbage
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(owner, selectors.EVENT_READ)
        running: dict[int, tuple[int, int]] = {}  # a descriptor of a rank's process -> its number, and where to report
        while True:
            for key, _ in selector.select():
                if key.fd in running:
                    _report(*running.pop(key.fd))
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    continue
                if key.fd == owner:
                    return
                text, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 3)
                if not text:
                    return
                pid = 0
                with contextlib.suppress(OSError):  # too many processes or files, or too little memory, at the moment
                    pid = _fork_rank(text, descriptors)
                    watched = os.pidfd_open(pid)
                    running[watched] = pid, os.dup(descriptors[1])
                    selector.register(watched, selectors.EVENT_READ)
                for descriptor in descriptors:
                    os.close(descriptor)
                if pid in {number for number, _ in running.values()}:
                    requests.send(_NUMBER.pack(pid))
                    continue
                if pid:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                requests.send(b"")


def _report(pid: int, status: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):  # its reader may be gone
        os.write(status, _NUMBER.pack(code))
    os.close(status)


def _close_all_but(kept: Collection[int]) -> None:
    """Close all descriptors from 3 on but some."""
    with os.scandir("/proc/self/fd") as entries:
        numbers = [int(entry.name) for entry in entries]
    for number in numbers:
        if number > 2 and number not in kept:
            with contextlib.suppress(OSError):  # that of the folder itself
                os.close(number)


def _fork_rank(text: bytes, descriptors: Sequence[int]) -> int:
    """Fork a rank; return its process id.

    ``text``: the request. ``descriptors``: of the socket of the rank, of the one for its exit code, and of standard
    error.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        end, _, errors = descriptors
        os.setsid()
        os.dup2(errors, 1)  # standard output belongs to the script
        os.dup2(errors, 2)
        _close_all_but({end})
        request = json.loads(text)
        rank, count, _, *others = request["words"]
        os.chdir(request["folder"])
        for name, value in request["environment"].items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        main([str(end), rank, count, str(os.getppid()), *others])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)

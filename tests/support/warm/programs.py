"""Commands and scripts that start immediately: a process that has imported torch forks for each of them.

A new interpreter needs seconds to import torch. ``run_warm`` is for programs that a test only waits for; a program that
a test interrupts or observes is a new interpreter (``Commands.start``).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import importlib
import json
import os
import random
import runpy
import select
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping
from multiprocessing import util
from pathlib import Path
from typing import Any

from support.damage.registry import VARIABLE
from support.warm import brief

AUTOPIPE = str(Path(sys.executable).with_name("autopipe"))
MODULES = (
    *("torch", "torch._dynamo", "safetensors.torch"),
    *("autopipe.cli.main", "autopipe.commands.artifact_steps", "autopipe.commands.training.runs"),
    *("autopipe.commands.script", "autopipe.script.runner", "torch.utils.data"),
)
TORCH = ("torch", "torch._dynamo", "numpy", "torch.utils.data")
"""For a script that is the reference of ``autopipe run``: nothing of autopipe."""
SIMULATED = "SIMULATED_LIBRARY"
_ONE_AT_A_TIME = threading.Lock()  # `make chaos` asks from several threads


def run_warm(
    program: str,
    *arguments: str,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    without: str = "",
    modules: tuple[str, ...] = MODULES,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run a script or ``AUTOPIPE`` in a folder.

    ``without``: a module that it cannot import. ``modules``: those that the process has imported from which it is
    forked.
    """
    variables = dict(os.environ if env is None else env)
    server = _server(modules, variables.get(SIMULATED, ""), variables.get("PYTHONPATH", ""))
    command = [program, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "stdout", Path(folder) / "stderr"
        request = {"command": command, "folder": str(cwd), "environment": variables}
        request["brief"] = program == AUTOPIPE
        with _ONE_AT_A_TIME:
            _write(server, {**request, "without": without, "stdout": str(out), "stderr": str(err)})
            pid = _read(server, 60)
            code = _read(server, timeout)
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, 9)
                _read(server, 60)
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())


@functools.cache
def _server(modules: tuple[str, ...], library: str, path: str) -> subprocess.Popen[bytes]:
    """Start the process that forks. ``library``: of its simulated devices; ``path``: where Python finds them."""
    simulated = {SIMULATED: library, "PYTHONPATH": path} if library else {}
    server = subprocess.Popen(
        [sys.executable, "-m", "support.warm.programs", *modules],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # so that select sees each line
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **simulated},
    )
    atexit.register(server.kill)
    return server


def _write(server: subprocess.Popen[bytes], request: dict[str, Any]) -> None:
    assert server.stdin is not None
    server.stdin.write(json.dumps(request).encode() + b"\n")


def _read(server: subprocess.Popen[bytes], seconds: float) -> Any:
    """Return the next number from the server, or None after a timeout."""
    assert server.stdout is not None
    if not select.select([server.stdout], [], [], seconds)[0]:
        return None
    line = server.stdout.readline()
    assert line, "the process that forks commands has ended"
    return int(line)


def _serve() -> dict[str, Any]:
    """Fork for every request, and answer with process id and exit code. Returns in forked processes only."""
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            request: dict[str, Any] = json.loads(line)
            return request
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    raise SystemExit(0)


def _warm_fork_server() -> None:
    """Let a process that waits here become the fork server of this one, in place of a new interpreter.

    It is forked before anything of the program is imported, so what it forks is as clean as that of a new one.
    """
    here, there = socket.socketpair()
    pid = os.fork()
    if pid:
        there.close()
        start = util.spawnv_passfds

        def started(path: Any, arguments: Any, descriptors: Any) -> int:
            if here.fileno() < 0 or "multiprocessing.forkserver" not in arguments[-1]:
                return int(start(path, arguments, descriptors))
            with here:
                text = json.dumps({"code": arguments[-1], "numbers": descriptors, "environment": dict(os.environ)})
                socket.send_fds(here, [text.encode()], descriptors)
            return pid

        util.spawnv_passfds = started  # type: ignore[attr-defined]  # mypy does not know it
        return
    here.close()
    text, descriptors, _, _ = socket.recv_fds(there, 1 << 20, 8)
    if not text:  # the program has ended, or closed all that it inherited
        os._exit(0)
    request = json.loads(text)
    os.environ.clear()
    os.environ.update(request["environment"])
    there.close()
    spare = [fcntl.fcntl(number, fcntl.F_DUPFD, 100) for number in descriptors]
    os.closerange(3, 100)
    for number, wanted in zip(spare, request["numbers"], strict=True):
        os.dup2(number, wanted)
        os.close(number)
    sys.argv = ["-c"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(request["code"], vars(main))  # that of multiprocessing
    os._exit(0)


def _become(request: dict[str, Any]) -> None:
    """Run the program as if it was started in its folder."""
    os.setsid()
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with Path(request[name]).open("w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # it is a file
    tempfile.tempdir = None
    random.seed()
    if SIMULATED in os.environ:
        importlib.import_module("support.simulated.devices").configure()
    if package := request["without"]:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        sys.modules[package] = None  # type: ignore[assignment]
    if request["brief"]:
        if VARIABLE not in os.environ:
            _warm_fork_server()
        brief.shorten(setattr)
    if VARIABLE in os.environ:
        importlib.import_module("support.damage.installing").install()
    program, *arguments = request["command"]
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    for module in sys.argv[1:]:
        importlib.import_module(module)
    _become(_serve())

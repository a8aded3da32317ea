"""Commands that start at once: a process that has imported autopipe forks for each of them.

A fresh interpreter needs seconds to import torch, for every command again. ``run_warm`` is for commands that only have
to end; what a test interrupts or watches is started as a user starts it (``Commands.start``).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import random
import runpy
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

AUTOPIPE = str(Path(sys.executable).with_name("autopipe"))
PRELOADED = "autopipe.cli.main", "autopipe.commands.steps", "autopipe.commands.training.runs"


def run_warm(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], files: Path, seconds: float
) -> tuple[int, str, str]:
    """Run ``autopipe`` with these arguments; return its exit code, stdout and stderr, which go through ``files``."""
    out, err = files / "stdout", files / "stderr"
    request = {"arguments": list(arguments), "folder": str(folder), "environment": dict(environment)}
    server = _server()
    _write(server, {**request, "stdout": str(out), "stderr": str(err)})
    pid = _read(server, 60)
    code = _read(server, seconds)
    if code is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, 9)
        code = _read(server, 60)
        raise subprocess.TimeoutExpired(["autopipe", *arguments], seconds, out.read_text(), err.read_text())
    return code, out.read_text(), err.read_text()


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "support.warm"],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    atexit.register(server.kill)
    return server


def _write(server: subprocess.Popen[str], request: dict[str, Any]) -> None:
    assert server.stdin is not None
    print(json.dumps(request), file=server.stdin, flush=True)


def _read(server: subprocess.Popen[str], seconds: float) -> Any:
    """Return the server's next number; None where it does not come in time."""
    assert server.stdout is not None
    if not select.select([server.stdout], [], [], seconds)[0]:
        return None
    line = server.stdout.readline()
    assert line, "the process that forks commands has ended"
    return int(line)


def _serve() -> dict[str, Any]:
    """Fork for every request, and answer with the process and its exit code. Returns in the forked processes only."""
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            request: dict[str, Any] = json.loads(line)
            return request
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    raise SystemExit(0)


def _become(request: dict[str, Any]) -> None:
    """Be a command that was started in its folder."""
    os.setsid()
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with Path(request[name]).open("w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()
    sys.argv = [AUTOPIPE, *request["arguments"]]
    sys.path[0] = str(Path(AUTOPIPE).parent)
    runpy.run_path(AUTOPIPE, run_name="__main__")


if __name__ == "__main__":
    import importlib

    for module in PRELOADED:
        importlib.import_module(module)
    _become(_serve())

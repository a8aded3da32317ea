"""A process that reads data, to test whether the data repeats, without the second in which it imports torch.

``command`` is for tests with another subject, as ``run_warm`` is for commands: it replaces the command of the new
process (``repeating.probe_command``). Its process asks a server to fork a process with its environment, folder and
descriptors. The server has the hash seed that the process would have. The forked process is killed when the asking one
ends. ``tests/many_processes/commands/test_repeating.py``, the chaos tests and every script test new processes.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

# as in repeating, which the asking process must not import
HASH_SEED = "3405691582"
FRESH = [sys.executable, "-P", "-m", "autopipe.workload.batches.probe"]


@functools.cache
def command() -> list[str]:
    """Return the command, after starting its server."""
    from support.warm import DATA_LIBRARY

    path = str(Path(tempfile.mkdtemp(prefix="ap-", dir="/tmp")) / "probe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        server = subprocess.Popen(
            [sys.executable, "-P", __file__, "serve", str(listener.fileno()), DATA_LIBRARY],
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": HASH_SEED},
        )
    atexit.register(_end, server, path)
    return [sys.executable, "-I", "-S", __file__, "ask", path]


def _end(server: subprocess.Popen[bytes], path: str) -> None:
    server.kill()
    server.wait()
    Path(path).unlink(missing_ok=True)
    Path(path).parent.rmdir()


def _ask(path: str) -> None:
    """Let the server fork a process, and wait for its end."""
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        os.execv(FRESH[0], FRESH)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        text = json.dumps({"folder": str(Path.cwd()), "environment": dict(os.environ)}).encode()
        connection.sendall(len(text).to_bytes(8, "big"))
        rights = array.array("i", [0, 1, 2]).tobytes()
        connection.sendmsg([text[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        connection.sendall(text[1:])
        for descriptor in (0, 1):
            os.close(descriptor)
        connection.recv(1)


def _serve(descriptor: int, library: str) -> None:
    """Fork for every request, after importing a library."""
    from autopipe.launch.rank.parent_death import die_with_parent
    from autopipe.workload.batches import probe

    die_with_parent()
    importlib.import_module(library)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, fileno=descriptor) as listener:
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _become(connection)
                probe.main()
                os._exit(0)
            connection.close()


def _become(connection: socket.socket) -> None:
    """Turn this process into the one that was asked for."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
    first, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(first + connection.recv(size - 1, socket.MSG_WAITALL))
    # the kernel kills this process and its children when the asking process ends
    fcntl.fcntl(connection, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        _ask(sys.argv[2])
    else:
        _serve(int(sys.argv[2]), sys.argv[3])

"""The fork server that a command forks from its own process before it uses torch."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.waiting import under_load, wait_until

from autopipe.launch.rank.signals import STOPPING

SCRIPT = """
import sys
import threading
from multiprocessing import forkserver, get_context

from autopipe.launch.rank import early_server, forked

if sys.argv[1] == "beside a thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if sys.argv[1] == "no process left":
    fork = early_server.os.fork
    early_server.os.fork = lambda: (_ for _ in ()).throw(OSError(11, "Resource temporarily unavailable"))
early_server.fork_early()
if sys.argv[1] == "no process left":
    early_server.os.fork = fork
forked.preload()
print(forkserver._forkserver._forkserver_pid, flush=True)

if sys.argv[1] == "replaced":
    sys.stdin.readline()
    forked.preload()
    print(forkserver._forkserver._forkserver_pid, flush=True)

process = get_context("forkserver").Process(target=print, args=("printed by a child",))
process.start()
process.join()
sys.stdin.readline()
"""

TITLE = "autopipe forkserver"


@pytest.fixture
def start(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"if __name__ == '__main__':\n    {SCRIPT.strip().replace(chr(10), chr(10) + '    ')}\n")
    started = []

    def start(kind):
        arguments = [sys.executable, str(script), kind, "token=hunter2"]
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process, psutil.Process(int(process.stdout.readline()))

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_server_is_forked_and_ends_with_its_parent(start):
    process, server = start("alone")
    assert server.ppid() == process.pid
    assert process.stdout.readline() == "printed by a child\n"
    wait_until(lambda: server.cmdline()[0] == TITLE, under_load(10))
    assert "hunter2" in " ".join(psutil.Process(process.pid).cmdline())
    assert "hunter2" not in " ".join(server.cmdline())
    status = dict(line.split(":", 1) for line in Path(f"/proc/{server.pid}/status").read_text().splitlines())
    mask = int(status["SigBlk"], 16) | int(status["SigIgn"], 16)
    assert all(mask >> (number - 1) & 1 for number in STOPPING)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs([server], timeout=under_load(3))
    assert not alive


@pytest.mark.parametrize("kind", ["beside a thread", "no process left"])
def test_the_server_is_started_afresh_where_it_cannot_be_forked(start, kind):
    process, server = start(kind)
    assert TITLE not in server.cmdline()
    assert process.stdout.readline() == "printed by a child\n"
    assert "forkserver" in " ".join(server.cmdline())


def test_a_forked_server_that_ends_is_replaced(start):
    process, server = start("replaced")
    wait_until(lambda: server.cmdline()[0] == TITLE, under_load(10))
    server.kill()
    wait_until(lambda: server.status() == psutil.STATUS_ZOMBIE, under_load(10))
    process.stdin.write("\n")
    process.stdin.flush()
    assert TITLE not in psutil.Process(int(process.stdout.readline())).cmdline()
    assert process.stdout.readline() == "printed by a child\n"

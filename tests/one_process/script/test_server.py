"""The server from which the ranks of a script are forked. Each test has a process of its own, without threads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, os, signal, socket, subprocess, sys, time
from autopipe.script.rank import server

def main(words):
    end = socket.socket(fileno=int(words[0]))
    print("a rank prints", flush=True)
    facts = {"words": words[1:], "parent": os.getppid(), "folder": os.getcwd(), "session": os.getsid(0) == os.getpid(),
             "environment": [os.environ.get(name) for name in ("SET", "HOME")],
             "input": os.read(0, 1).decode()}
    end.sendall(json.dumps(facts).encode() + b"\\n")
    code = end.recv(1)  # until the owner names it
    os._exit(code[0] if code else 9)

server.main = main
if "ignored" in sys.argv:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
ranks = server.RankServer.forked()
if ranks is None:
    print(json.dumps({"server": None}))
    sys.exit()
os.environ["SET"] = "by the script"
del os.environ["HOME"]
os.chdir("/tmp")
answer = {"server": ranks.pid, "ranks": []}

def started(words):
    here, there = socket.socketpair()
    process = ranks.start(words, there)
    there.close()
    return process, here

"""


def run(steps: str, *words: str) -> tuple[dict[str, Any], str]:
    """Run the steps after the server has started; return what they put into ``answer``, and standard error."""
    program = PROGRAM + steps + "\nprint(json.dumps(answer))\n"
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=100, input="not for a rank"
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer, done.stderr


def test_a_rank_has_the_folder_and_the_environment_of_the_script() -> None:
    answer, errors = run(
        """
for rank in (0, 1):
    process, here = started([str(rank), "2", "0", "/a/folder", "5.0"])
    answer["ranks"].append(json.loads(here.makefile().readline()))
    assert process.poll() is None
    try:
        process.wait(0.01)
    except subprocess.TimeoutExpired:
        answer["waited"] = True
    here.sendall(bytes([7 + rank]))
    answer["ranks"][-1]["codes"] = [process.wait(20), process.poll()]
    process.kill()
ranks.close()
for _ in range(200):
    try:
        answer["left"] = "State:\\tZ" not in open(f"/proc/{ranks.pid}/status").read()
    except OSError:
        answer["left"] = False
    if not answer["left"]:
        break
    time.sleep(0.05)
"""
    )
    for rank, facts in enumerate(answer["ranks"]):
        assert facts == {
            "words": [str(rank), "2", str(answer["server"]), "/a/folder", "5.0"],
            "parent": answer["server"],
            "folder": "/tmp",
            "session": True,
            "environment": ["by the script", None],
            "input": "",
            "codes": [7 + rank, 7 + rank],
        }
    assert answer["waited"] and not answer["left"]
    assert errors.count("a rank prints") == 2


def test_a_killed_rank_and_a_killed_server_are_seen() -> None:
    answer, _ = run(
        """
process, here = started(["0", "2", "0"])
process.kill()
answer["killed"] = process.wait(20)
process, here = started(["0", "2", "0"])
os.kill(ranks.pid, signal.SIGKILL)
answer["without server"] = process.wait(20)
answer["not started"] = started(["1", "2", "0"])[0] is None
ranks.close()
"""
    )
    assert (answer["killed"], answer["without server"], answer["not started"]) == (-9, -9, True)


@pytest.mark.parametrize(
    ("steps", "forked"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '3'", False),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = ''", False),
        ("os.environ['WANDB_MODE'] = 'offline'", True),
        ("os.environ['LONG'] = 'x' * 70000", False),
        ("os.umask(0o077)", False),
        ("import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.nice(1)", False),
        ("os.closerange(3, 256); files = [socket.socket() for _ in range(20)]", False),
    ],
)
def test_what_the_script_has_changed_may_need_a_new_process(steps: str, forked: bool) -> None:
    answer, _ = run(f"{steps}\nanswer['forked'] = started(['0', '2', '0'])[0] is not None\nranks.close()")
    assert answer["forked"] == forked


def test_a_late_answer_is_not_that_to_another_request() -> None:
    answer, _ = run(
        """
server._ANSWER_SECONDS = 0.3
ranks._end.settimeout(0.3)
os.kill(ranks.pid, signal.SIGSTOP)
answer["forked"] = [started([str(rank), "2", "0"])[0] is not None for rank in (0, 1)]
"""
    )
    assert answer["forked"] == [False, False]


def test_the_server_is_no_child_and_keeps_no_file_of_the_script() -> None:
    answer, _ = run(
        """
try:
    os.wait()
except ChildProcessError:
    answer["children"] = "none"
process, here = started(["0", "2", "0"])
here.makefile().readline()  # it has closed what it does not need
links = {pid: [os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")]
         for pid in (ranks.pid, process.pid)}
own = {os.readlink(f"/proc/self/fd/{n}") for n in (0, 1)}
answer["kept"] = {str(pid): sorted(own & set(names)) for pid, names in links.items()}
answer["pipes"] = {str(pid): sum(name.startswith("pipe") for name in names) for pid, names in links.items()}
ranks.close()
"""
    )
    assert answer["children"] == "none"
    assert list(answer["kept"].values()) == [[], []]
    assert list(answer["pipes"].values()) == [0, 2]  # standard output and standard error of the rank


def test_ignored_ends_of_processes_are_no_loss() -> None:
    answer, _ = run("ranks.close()", "ignored")
    assert answer["server"] is None


def test_beside_threads_nothing_is_forked(tmp_path: Path) -> None:
    program = """
import threading
from autopipe.script.rank.server import RankServer
waiting = threading.Event()
threading.Thread(target=waiting.wait).start()
print(RankServer.forked())
waiting.set()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "None\n"

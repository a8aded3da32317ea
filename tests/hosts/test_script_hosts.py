"""``autopipe run`` on two hosts: the output and the weights of ``python``, and failures that name rank and host."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from support.hosts import slurm_cluster
from support.hosts.launches import AUTOPIPE, environment, free_port, one_line
from support.hosts.two_hosts import Hosts, why_not
from support.waiting import under_load, wait_until

pytestmark = pytest.mark.hosts
ON_HOSTS = pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts")
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
SCRIPT = """
import os
import sys
import time

import torch
from torch import nn

assert "RANK" not in os.environ and "WORLD_SIZE" not in os.environ
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (nn.Linear(24, 24), nn.Tanh())]
model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(24, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(int(sys.argv[1])):
    for _ in range(3):
        x, y = torch.randn(8, 24), torch.randn(8, 1)
        loss = (model(x) - y).pow(2).mean()
        (loss / 3).backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
    if len(sys.argv) > 3:
        time.sleep(0.1)
torch.save(model.state_dict(), sys.argv[2])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script")
    (path / "train.py").write_text(SCRIPT)
    done = finished([sys.executable, "train.py", "5", "python.pt"], path)
    assert done.returncode == 0, done.stderr
    (path / "python.txt").write_text(done.stdout)
    return path


def finished(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=150, env=environment(), check=False
    )


def assert_as_python(folder: Path, out: str, weights: str) -> None:
    assert out == (folder / "python.txt").read_text()
    ours, theirs = torch.load(folder / weights), torch.load(folder / "python.pt")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def of_the_run(folder: Path) -> list[psutil.Process]:
    """Return the processes that run in the folder, of this run or left behind by it."""
    alive = []
    for process in psutil.process_iter():
        try:
            mine = process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid()
            if not mine and Path(process.cwd()) == folder:
                alive.append(process)
        except (psutil.Error, OSError):
            continue
    return alive


def assert_gone(folder: Path, seconds: float) -> None:
    end = time.monotonic() + under_load(seconds)
    while left := of_the_run(folder):
        assert time.monotonic() < end, [process.cmdline() for process in left]
        time.sleep(0.05)


@ON_HOSTS
@pytest.mark.parametrize(
    ("slots", "replicas"), [("h0:1,h1:2", "never"), ("localhost:1,h1:1", "never"), ("h0:1,h1:1", "2")]
)
def test_ranks_over_ssh_give_the_output_and_weights_of_python(
    hosts: Hosts, folder: Path, slots: str, replicas: str
) -> None:
    words = ("--hosts", slots, "--replicas", replicas, "--ssh-config", str(hosts.config), "--", "5", "ssh.pt")
    done = finished(hosts.inside(0, *AUTOPIPE, "run", "train.py", *words), folder)
    assert done.returncode == 0, done.stderr
    assert_as_python(folder, done.stdout, "ssh.pt")
    assert_gone(folder, 5)


@ON_HOSTS
def test_a_killed_rank_over_ssh_is_named_with_its_host(hosts: Hosts, folder: Path) -> None:
    words = ("--hosts", "h0:1,h1:1", "--ssh-config", str(hosts.config), "--", "100000", "killed.pt", "slow")
    command = hosts.inside(0, *AUTOPIPE, "run", "train.py", *words)
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline().split()[0] for _ in range(3)] == ["0", "1", "2"]
        joined = [p for p in hosts.processes(1) if "autopipe.script.rank.joining" in " ".join(p.cmdline())]
        joined[0].kill()
        begin = time.monotonic()
        _, err = process.communicate(timeout=60)
    assert time.monotonic() - begin < under_load(8)
    assert process.returncode == 3, err
    assert "rank 1 on h1" in one_line(err)
    assert_gone(folder, 5)


@ON_HOSTS
def test_a_host_that_cannot_be_reached_is_named(hosts: Hosts, folder: Path) -> None:
    words = ("--hosts", "h0:1,nowhere.invalid:1", "--ssh-config", str(hosts.config), "--", "5", "none.pt")
    done = finished(hosts.inside(0, *AUTOPIPE, "run", "train.py", "--check", "0", *words), folder)
    assert done.returncode not in (0, None)
    assert "nowhere.invalid" in one_line(done.stderr)
    assert_gone(folder, 5)


OTHER_PYTHON = """#!/bin/sh
exec {python} -c '
import importlib.metadata, platform, runpy, sys

version = importlib.metadata.version
importlib.metadata.version = lambda name: "{torch}" if name == "torch" else version(name)
platform.python_version = lambda: "{version}"
module = sys.argv[3]  # after -P -m
runpy.run_module(module, run_name="__main__", alter_sys=True)
' "$@"
"""


@ON_HOSTS
@pytest.mark.parametrize(("torch_there", "python_there"), [("1.0", "3.99.1"), ("same", "3.99.1")])
def test_another_version_on_a_host_ends_the_run_before_the_script(
    hosts: Hosts, folder: Path, tmp_path: Path, torch_there: str, python_there: str
) -> None:
    there = torch.__version__ if torch_there == "same" else torch_there
    other = tmp_path / "python"
    other.write_text(OTHER_PYTHON.format(python=sys.executable, torch=there, version=python_there))
    other.chmod(0o755)
    words = ("--hosts", "h1:2", "--ssh-config", str(hosts.config), "--remote-python", str(other))
    done = finished(hosts.inside(0, *AUTOPIPE, "run", "train.py", *words, "--", "5", "none.pt"), folder)
    assert done.returncode == 1 and done.stdout == "", done.stderr
    text = one_line(done.stderr)
    here = torch.__version__.partition("+")[0] if torch_there != "same" else platform.python_version()
    assert "host h1" in text and (torch_there if torch_there != "same" else python_there) in text and here in text
    assert_gone(folder, 5)


@ON_HOSTS
def test_another_module_of_the_script_on_a_host_is_refused_before_the_first_step(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import parts\n" + SCRIPT)
    (tmp_path / "parts.py").write_text("LAYERS = 4\n")
    here, there = tmp_path / "parts.py", tmp_path / "there.py"
    there.write_text("LAYERS = 5\n")
    words = ("--hosts", "h1:2", "--ssh-config", str(hosts.config), "--check", "0", "--", "5", "none.pt")
    command = " ".join(map(shlex.quote, (*AUTOPIPE, "run", "train.py", *words)))
    # this host has another file at the same path
    mounted = f"mount --bind {shlex.quote(str(there))} {shlex.quote(str(here))} && exec {command}"
    done = finished(hosts.inside(0, "unshare", "-m", "sh", "-c", mounted), tmp_path)
    assert done.returncode == 1 and done.stdout == "", done.stderr
    text = one_line(done.stderr)
    digests = [hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in (here, there)]
    assert "parts.py" in text and "host h1" in text and all(digest in text for digest in digests)
    assert_gone(tmp_path, 5)


def torchrun(index: int, port: int, *words: str) -> list[str]:
    node = [TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(index)]
    where = ["--master-addr", "127.0.0.1", "--master-port", str(port), "--no-python"]
    return [*node, *where, *AUTOPIPE, "run", "--launcher", "env", "train.py", *words]


@pytest.mark.parametrize("words", [("--", "5", "torchrun.pt"), ("--check", "0", "--", "0", "torchrun.pt")])
def test_torchrun_runs_the_script_once(folder: Path, words: tuple[str, ...]) -> None:
    port = free_port()
    second = subprocess.Popen(
        torchrun(1, port, *words),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    first = finished(torchrun(0, port, *words), folder)
    out, err = second.communicate(timeout=60)
    assert first.returncode == 0, first.stderr
    assert (second.returncode, out) == (0, ""), err
    if words[-2] == "5":
        assert_as_python(folder, first.stdout, "torchrun.pt")
    assert_gone(folder, 5)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_those_of_all_ranks(folder: Path, killed: int, tmp_path: Path) -> None:
    port = free_port()
    words = ("--check", "0", "--", "100000", "killed.pt", "slow")
    agents = [
        subprocess.Popen(
            torchrun(index, port, *words),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment(), "TMPDIR": str(tmp_path)},
        )
        for index in range(2)
    ]
    try:
        assert agents[0].stdout is not None
        assert [agents[0].stdout.readline().split()[0] for _ in range(3)] == ["0", "1", "2"]
        victim = psutil.Process(agents[killed].pid).children()[0]
        victim.kill()
        texts = [agent.communicate(timeout=60)[1] for agent in agents]
        assert all(agent.returncode != 0 for agent in agents), texts
        if killed == 1:
            assert "rank 1 on" in one_line(texts[0]), texts[0]
    finally:
        for agent in agents:
            agent.kill()
    wait_until(lambda: not of_the_run(folder), 15)
    wait_until(lambda: not list(tmp_path.glob("autopipe-run-*")), 15)


def test_another_number_of_stages_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    done = finished([*AUTOPIPE, "run", "--launcher", "env", "--gpus", "3", "train.py", "--", "5", "x.pt"], folder)
    assert done.returncode == 1 and "--gpus is 3, but torchrun has started 2 ranks" in one_line(done.stderr)


@pytest.mark.skipif(bool(slurm_cluster.why_not()), reason=slurm_cluster.why_not() or "slurm")
def test_slurm_runs_the_script_once_in_an_allocation_and_in_a_batch_job(folder: Path, tmp_path: Path) -> None:
    words = (*AUTOPIPE, "run", "--launcher", "slurm", "train.py", "--", "5")
    with slurm_cluster.slurm(tmp_path) as cluster:
        done = cluster.run(*slurm_cluster.ALLOCATED, *words, "srun.pt", cwd=folder, seconds=150)
        assert done.returncode == 0, done.stderr
        assert_as_python(folder, done.stdout, "srun.pt")

        batch = ("sbatch", "--parsable", *slurm_cluster.ON_BOTH, "--output=out.txt", "--error=errors.txt")
        job = cluster.run(*batch, "--wrap", shlex.join([*words, "sbatch.pt"]), cwd=folder).stdout.strip()
        state = cluster.wait(job, ["COMPLETED", "FAILED"], 150)
        assert state == "COMPLETED 0:0", f"{(folder / 'errors.txt').read_text()}\n{cluster.logs()}"
        assert_as_python(folder, (folder / "out.txt").read_text(), "sbatch.pt")
    assert slurm_cluster.left(tmp_path) == []


def test_slurm_needs_an_allocation(folder: Path) -> None:
    done = finished([*AUTOPIPE, "run", "--launcher", "slurm", "train.py", "--", "5", "x.pt"], folder)
    assert done.returncode == 1 and "salloc --ntasks=N" in one_line(done.stderr)

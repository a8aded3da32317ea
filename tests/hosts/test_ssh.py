"""Training over ssh on two hosts: weights equal to a local run; every failure is reported and leaves no process."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import torch
from support.hosts.launches import MODEL, environment
from support.hosts.two_hosts import Hosts, why_not, words
from support.waiting import short_pause, under_load
from support.warm.programs import AUTOPIPE

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts")]
OPTIONS = ["--device", "cpu", "--batch-size", "8", "--num-microbatches", "4", "--schedule", "1f1b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its plan for four ranks, shared by the runs of this file."""
    path = tmp_path_factory.mktemp("work")
    (path / "model.py").write_text(MODEL)
    here(path, "plan", "model.py", "--gpus", "4", *OPTIONS)
    return path


def finished(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder to its end."""
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, env=environment(), check=False
    )


def here(path: Path, *words: str) -> str:
    """Run autopipe on this machine alone."""
    done = finished([AUTOPIPE, *words], path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_same_weights(folder: Path, *runs: Path) -> None:
    """Export two runs, and assert that their weights are equal, bit for bit."""
    for run in runs:
        here(folder, "export", str(run), "-o", f"{run}.pt")
    ours, theirs = (torch.load(f"{run}.pt") for run in runs)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def over_ssh(hosts: Hosts, *words: str, slots: str = "") -> list[str]:
    slots = slots or ",".join(f"{name}:2" for name in hosts.names)
    return hosts.inside(0, AUTOPIPE, *words, "--hosts", slots, "--ssh-config", str(hosts.config))


@pytest.fixture
def train(hosts: Hosts, folder: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a long run on both hosts, and return once it has trained some steps."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> subprocess.Popen[str]:
        command = over_ssh(hosts, "train", "--run-dir", str(tmp_path / "run"), "--steps", "1000000", *words)
        process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        )
        started.append(process)
        metrics = tmp_path / "run" / "metrics.jsonl"
        end = time.monotonic() + 90
        while not (metrics.is_file() and metrics.read_text().count("\n") > 3):
            if process.poll() is not None or time.monotonic() > end:
                process.kill()
                raise AssertionError(process.communicate())
            short_pause()
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    for index in range(len(hosts.names)):
        for left in hosts.processes(index):
            left.kill()


def assert_nothing_runs(hosts: Hosts, seconds: float) -> None:
    end = time.monotonic() + under_load(seconds)
    while left := [words(p) for index in range(len(hosts.names)) for p in hosts.processes(index)]:
        assert time.monotonic() < end, left
        short_pause()


def ended(process: subprocess.Popen[str], seconds: float) -> str:
    """Assert that the command ends in time without a traceback; return its stderr as one line."""
    begin = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begin < under_load(seconds), err
    assert "Traceback" not in err
    assert "bug in autopipe" not in err
    return " ".join(err.split())


@pytest.mark.parametrize("slots", ["h0:2,h1:2", "localhost:2,h1:2"])
def test_weights_equal_those_of_a_local_run(hosts: Hosts, folder: Path, tmp_path: Path, slots: str) -> None:
    remote, local = tmp_path / "remote", tmp_path / "local"
    done = finished(over_ssh(hosts, "train", "--run-dir", str(remote), "--steps", "5", "--json", slots=slots), folder)
    assert done.returncode == 0, done.stderr
    here(folder, "train", "--run-dir", str(local), "--steps", "5")
    assert_same_weights(folder, local, remote)
    assert (remote / "metrics.jsonl").read_text().count('"step"') == 5
    assert '"audit": 1, "equal": true' in (remote / "metrics.jsonl").read_text()
    assert_nothing_runs(hosts, 5)


def test_a_killed_rank_is_reported_with_its_host(hosts: Hosts, train) -> None:
    process = train()
    for index in (0, 1):  # the ranks use one address, and no process of a run listens on every interface
        assert hosts.listening(index) <= {"127.0.0.1", hosts.address(index)}
    hosts.ranks(1)[3].kill()
    text = ended(process, 5)
    assert process.returncode == 3
    assert "killed by SIGKILL" in text
    assert re.search(r"rank 3 on h1, stage 3( \(.+?\))?, instruction", text)
    assert_nothing_runs(hosts, 5)


def test_a_killed_peer_is_reported_and_its_ranks_end(hosts: Hosts, train) -> None:
    process = train()
    hosts.peer(1).kill()
    text = ended(process, 8)
    assert process.returncode == 3
    assert "the process on h1 is gone" in text
    assert_nothing_runs(hosts, 5)


def test_a_killed_ssh_client_is_reported_as_a_lost_host(hosts: Hosts, train) -> None:
    process = train()
    clients = [p for p in hosts.processes(0) if p.name() == "ssh" and "h1" in words(p)]
    assert len(clients) == 1
    clients[0].kill()
    text = ended(process, 8)
    assert process.returncode == 3
    assert "h1" in text
    assert_nothing_runs(hosts, 5)


def test_a_network_failure_is_reported_and_the_isolated_host_ends_its_ranks(hosts: Hosts, train) -> None:
    process = train()
    hosts.link(1, "down")
    try:
        text = ended(process, 15)
        assert process.returncode == 3
        assert "h1" in text and ("does not answer" in text or "ssh to h1 failed" in text), text
        assert_nothing_runs(hosts, 25)  # the link is still down, so no message reached the host
    finally:
        hosts.link(1, "up")


def test_a_killed_coordinator_leaves_no_process_on_any_host(hosts: Hosts, train) -> None:
    process = train()
    coordinators = [p for p in hosts.processes(0) if "train" in words(p) and p.name().startswith("autopipe")]
    for coordinator in coordinators or [psutil.Process(process.pid)]:
        coordinator.kill()
    process.communicate(timeout=10)
    assert_nothing_runs(hosts, 5)


def test_a_second_ctrl_c_ends_all_hosts_immediately(hosts: Hosts, train) -> None:
    process = train()
    process.send_signal(signal.SIGINT)
    short_pause()
    process.send_signal(signal.SIGINT)
    ended(process, 8)
    assert process.returncode in (75, 130)
    assert_nothing_runs(hosts, 5)


@pytest.mark.parametrize("of", ["the command", "its process on a host"])
def test_sigterm_stops_all_hosts_with_a_checkpoint(hosts: Hosts, train, tmp_path, of: str) -> None:
    process = train()
    (process if of == "the command" else hosts.peer(1)).send_signal(signal.SIGTERM)
    ended(process, 30)
    assert process.returncode == 75
    assert (tmp_path / "run" / "checkpoints" / "latest").is_file()
    assert_nothing_runs(hosts, 5)


@pytest.mark.parametrize("fault", ["peer", "link"])
def test_an_elastic_run_continues_on_the_remaining_host_to_equal_weights(
    hosts: Hosts, folder: Path, train, tmp_path: Path, fault: str
) -> None:
    process = train("--elastic", "--max-restarts", "1", "--checkpoint-every", "5")
    metrics, planned = tmp_path / "run" / "metrics.jsonl", (folder / ".autopipe" / "plan.json").read_bytes()
    latest = tmp_path / "run" / "checkpoints" / "latest"
    while not latest.is_file():
        assert process.poll() is None, process.communicate()
        short_pause()
    hosts.peer(1).kill() if fault == "peer" else hosts.link(1, "down")
    try:
        end = time.monotonic() + 60
        while '"restart"' not in metrics.read_text() or metrics.read_text().partition('"restart"')[2].count("\n") < 4:
            assert process.poll() is None and time.monotonic() < end, process.communicate()
            short_pause()
        assert sorted(hosts.ranks(0)) == [0, 1]
        if fault == "peer":
            assert not hosts.ranks(1)
        process.send_signal(signal.SIGTERM)
        text = ended(process, 30)
        assert process.returncode == 75
        assert "restart 1 of 1, from the checkpoint of step" in text and "on 2 ranks" in text
        assert_nothing_runs(hosts, 5 if fault == "peer" else 25)
    finally:
        hosts.link(1, "up")
    assert (folder / ".autopipe" / "plan.json").read_bytes() == planned  # the next run may use both hosts again
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    restart = next(line for line in lines if "restart" in line)
    assert restart["from_step"] > 0 and restart["from_step"] % 5 == 0
    steps = int(latest.read_text().strip().removeprefix("step-"))
    here(folder, "train", "--gpus", "4", "--run-dir", str(tmp_path / "whole"), "--steps", str(steps))
    assert_same_weights(folder, tmp_path / "run", tmp_path / "whole")


def test_doctor_examines_every_host(hosts: Hosts, folder: Path) -> None:
    done = finished(over_ssh(hosts, "doctor", "--json"), folder)
    findings = json.loads(done.stdout)["findings"]
    assert done.returncode == 0, findings
    network = {f["host"]: f for f in findings if f["name"] == "network"}
    assert sorted(network) == ["h0", "h1"]
    assert "10.77.0.2 (eth0) reaches every other host" in network["h1"]["found"]
    assert {f["name"] for f in findings} == {"autopipe", "torch", "python", "memory", "clock", "network"}


def test_a_host_without_autopipe_is_refused_with_the_option_to_set(hosts: Hosts, folder: Path) -> None:
    command = over_ssh(hosts, "train", "--steps", "1", "--remote-python", "/usr/bin/env")
    done = finished(command, folder)
    assert done.returncode == 1, done.stderr
    assert "--remote-python" in done.stderr
    assert "Traceback" not in done.stderr
    assert_nothing_runs(hosts, 5)


def test_a_run_directory_that_is_not_shared_is_refused(hosts: Hosts, folder: Path, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    # a mount that only the coordinator sees
    script = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(private)]
    words = [AUTOPIPE, "train", "--steps", "1", "--run-dir", str(private / "run")]
    slots = ",".join(f"{name}:2" for name in hosts.names)
    command = hosts.inside(0, *script, *words, "--hosts", slots, "--ssh-config", str(hosts.config))
    done = finished(command, folder)
    assert done.returncode == 1, done.stderr
    assert "is another folder on this host" in done.stderr
    assert "--run-dir" in done.stderr


def test_an_unreachable_host_is_named(hosts: Hosts, folder: Path) -> None:
    command = hosts.inside(0, AUTOPIPE, "train", "--steps", "1", "--gpus", "4", "--ssh-config", str(hosts.config))
    done = finished([*command, "--hosts", "h0:2,nowhere:2"], folder)
    assert done.returncode == 1
    assert "ssh to nowhere failed" in done.stderr
    assert_nothing_runs(hosts, 5)

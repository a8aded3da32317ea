"""Links measured between two processes, and the plans that use them."""

import concurrent.futures
import json
import multiprocessing
import os
import signal
import socket
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.commands import Commands, assert_gone, descendants

from autopipe.cli.main import autopipe
from autopipe.commands.calibration import link_ranks as measuring
from autopipe.commands.calibration import probe_models, runtime_overhead
from autopipe.commands.calibration.link_ranks import THROUGH_HOST, measure_links
from autopipe.errors import RunError
from autopipe.ir import artifact
from autopipe.ir.cluster import Links
from autopipe.launch.remote.rank_environment import RankIdentity
from autopipe.launch.request import LaunchSettings
from autopipe.report.results import TrainResult


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_two_ranks_are_measured_and_no_process_remains():
    links = measure_links("cpu")
    assert links.device_kind == "cpu"
    # wide bounds: they hold for any machine, even under load
    assert 1e-7 < links.latency_seconds < 1
    assert 1e6 < links.bandwidth < 1e12
    assert 1e6 < links.all_reduce_bandwidth < 1e12
    assert multiprocessing.active_children() == []


def test_two_processes_of_a_launcher_measure_between_their_hosts():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ends = [
        RankIdentity(
            launcher="srun", rank=rank, world_size=2, local_rank=0, local_world_size=1, address="127.0.0.1", port=port
        )
        for rank in (0, 1)
    ]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        levels = list(pool.map(lambda identity: measuring.measure_across("cpu", identity, LaunchSettings()), ends))
    for level in levels:
        assert (level.count, 1e6 < level.bandwidth < 1e12, 1e-7 < level.latency_seconds < 1) == (2, True, True)
    assert multiprocessing.active_children() == []


def test_a_rank_that_fails_is_an_error_with_its_message():
    with pytest.raises(RunError, match="the links could not be measured: rank"):
        measure_links("nonsense")
    assert multiprocessing.active_children() == []


def test_ctrl_c_between_the_starts_of_the_ranks_leaves_none(monkeypatch):
    started = []

    def interrupted(process):
        if started:
            raise KeyboardInterrupt
        started.append(process)
        plain(process)

    plain = ForkServerProcess.start
    monkeypatch.setattr(ForkServerProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_links("cpu")
    assert not started[0].is_alive()
    assert multiprocessing.active_children() == []


def test_ctrl_c_ends_doctor_at_once(folder):
    commands = Commands(folder)
    try:
        process = commands.start("doctor", "--links")
        text = ""
        while "measuring the links" not in text:
            line = process.stderr.readline()
            assert line, text
            text += line
        below = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, err = process.communicate(timeout=30)
        assert (process.returncode, "Traceback" in err) == (130, False), err
        assert_gone(below)
    finally:
        commands.end()


def test_ctrl_c_that_a_small_run_took_ends_the_measurement(monkeypatch):
    stopped = TrainResult((), 0, 0.0, 0.0, 2, "1f1b", 2, "", "", stopped=True)
    monkeypatch.setattr(runtime_overhead.runs, "train", lambda settings, events: stopped)
    with pytest.raises(KeyboardInterrupt):
        runtime_overhead.measure_overhead("cpu")


def test_the_bandwidth_is_that_of_the_difference_of_two_messages():
    small, large = THROUGH_HOST.small, THROUGH_HOST.large
    seconds = {small: 0.001 + small / 1e9, large: 0.001 + large / 1e9}
    assert measuring._slope(seconds, THROUGH_HOST) == pytest.approx(1e9)
    assert measuring._slope({small: 0.5, large: 0.1}, THROUGH_HOST) == large / 0.1


def test_doctor_measures_and_keeps_the_links(folder, monkeypatch):
    # for the figures, not for their accuracy
    monkeypatch.setattr(runtime_overhead, "ROUNDS", 1)
    monkeypatch.setattr(probe_models, "STEPS", runtime_overhead.FEWER_STEPS)
    done = CliRunner().invoke(autopipe, ["doctor", "--links", "--json"])
    document = json.loads(done.stdout)
    links = artifact.load(Links, Path(".autopipe/links.json"), renew="")
    assert document["links"]["bandwidth"] == links.bandwidth


@pytest.mark.slow  # it measures for a minute
def test_doctor_says_the_links_in_words(folder):
    assert "latency" in CliRunner().invoke(autopipe, ["doctor", "--links"]).stdout
    assert "latency" not in CliRunner().invoke(autopipe, ["doctor"]).stdout

"""The preflight checks find every difference between hosts, with a remedy."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.waiting import under_load, wait_until

from autopipe import __version__
from autopipe.commands.doctor import examine_hosts
from autopipe.errors import RunError
from autopipe.launch.remote import network, preflight, protocol
from autopipe.launch.remote.answers import answer
from autopipe.launch.remote.connections import Peer
from autopipe.launch.remote.preflight import Survey
from autopipe.launch.remote.rank_host import RankHost
from autopipe.launch.remote.ssh_peers import SshPeers, first_question
from autopipe.launch.request import Host, LaunchSettings, WorkerSpec

GIB = 2**30


def described(facts: tuple[dict[str, Any], ...], *, hosts: tuple[str, ...] = ("h1",), offset: float = 0.0) -> Survey:
    size = len(hosts)
    return Survey(hosts=hosts, facts=facts, offsets_seconds=(offset,) * size, addresses=(("10.0.0.1", "eth0"),) * size)


def survey(**changed: Any) -> Survey:
    facts = {
        "autopipe": __version__,
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "memory_bytes": 8 * GIB,
        "gpus": [],
        "folder": True,
    }
    return described(({**facts, **changed},))


def test_the_same_versions_are_fine() -> None:
    assert {finding.state for finding in preflight.versions(survey())} == {"ok"}


@pytest.mark.parametrize(
    ("changed", "name", "fix"),
    [
        ({"torch": "1.0"}, "torch", "pip install torch=="),
        ({"torch": ""}, "torch", "pip install torch=="),
        ({"autopipe": "0.0.1"}, "autopipe", f"pip install autopipe-train=={__version__}"),
        ({"python": "3.8.1"}, "python", "use Python"),
    ],
)
def test_another_version_is_a_problem_with_its_fix(changed: dict[str, Any], name: str, fix: str) -> None:
    (findings,) = [finding for finding in preflight.versions(survey(**changed)) if finding.state == "problem"]
    assert (findings.name, findings.host) == (name, "h1")
    assert fix in findings.fix
    with pytest.raises(RunError, match=name) as caught:
        preflight.first_problem(preflight.versions(survey(**changed)))
    assert caught.value.where == "host h1" and caught.value.remedy == findings.fix


def test_another_build_of_torch_is_fine_here_and_not_between_hosts() -> None:
    base = importlib.metadata.version("torch").partition("+")[0]
    facts = [survey(torch=f"{base}+{build}").facts[0] for build in ("cu130", "cu130", "rocm7")]
    three = described(tuple(facts), hosts=("h1", "h2", "h3"))
    (findings,) = [finding for finding in preflight.versions(three) if finding.state == "problem"]
    assert (findings.host, findings.name) == ("h3", "torch")
    assert f"on h1 it is {base}+cu130" in findings.detail


def test_memory_is_that_of_the_ranks_of_the_host() -> None:
    (enough,) = preflight.memory(survey(), [[3 * GIB, 4 * GIB]], devices=False)
    (short,) = preflight.memory(survey(), [[5 * GIB, 4 * GIB]], devices=False)
    assert enough.state == "ok"
    assert short.state == "problem" and "8.00 GiB free, 9.00 GiB needed" in short.detail and short.fix


def test_a_gpu_holds_what_its_ranks_need() -> None:
    gpus = [("A100", 30 * GIB, 40 * GIB), ("A100", 10 * GIB, 40 * GIB)]
    findings = list(preflight.memory(survey(gpus=gpus), [[20 * GIB, 20 * GIB]], devices=True))
    assert [finding.state for finding in findings] == ["ok", "problem", "ok"]
    assert "--gpu-memory 10GiB" in findings[1].fix
    (none, _) = preflight.memory(survey(), [[20 * GIB]], devices=True)
    assert none.state == "problem" and "--device cpu" in none.fix


def test_a_wrong_clock_is_reported_as_a_warning() -> None:
    off = described(survey().facts, offset=-90.0)
    (findings,) = preflight.clocks(off)
    assert findings.state == "note" and "-90000.0 ms" in findings.detail and "h1" in findings.fix


def test_a_public_address_is_refused_unless_it_is_trusted() -> None:
    with pytest.raises(RunError, match=r"8\.8\.8\.8") as caught:
        network.refuse_public("8.8.8.8", trusted=False)
    assert "--i-trust-this-network" in caught.value.remedy
    network.refuse_public("8.8.8.8", trusted=True)
    for address in ("10.0.0.1", "192.168.1.1", "127.0.0.1", "fd00::1", "100.64.0.1"):
        network.refuse_public(address, trusted=False)


def test_a_socket_listens_on_its_address_only() -> None:
    with network.listen("127.0.0.1") as listener:
        address, port = listener.getsockname()
        assert address == "127.0.0.1"
        assert network.reach("127.0.0.1", port, 1.0) == ""
        with pytest.raises(RunError, match=str(port)):
            network.listen("127.0.0.1", port)
    assert network.reach("127.0.0.1", port, 1.0) != ""


def test_an_interface_is_found_by_address_and_by_route() -> None:
    assert network.interface_of("127.0.0.1") == network.interface_towards("127.0.0.1") == "lo"
    assert network.address_of("lo") == "127.0.0.1"
    with pytest.raises(RunError, match="nosuch") as caught:
        network.address_of("nosuch")
    assert "lo" in caught.value.remedy
    with pytest.raises(RunError, match="cannot be resolved"):
        network.resolve("no such host")


def test_the_address_of_a_store_is_parsed() -> None:
    for address, port in (("10.0.0.1", 1234), ("fe80::1", 5)):
        assert network.parse_tcp(network.tcp_address(address, port)) == (address, port)
    for wrong in ("tcp://", "tcp://h", "tcp://h:x", "h1"):
        with pytest.raises(ValueError, match="address:port"):
            network.parse_tcp(wrong)


@pytest.fixture
def peers():
    with SshPeers(["localhost", "127.0.0.1"], LaunchSettings()) as started:
        yield started


def test_two_peers_answer_and_reach_each_other(peers: SshPeers, tmp_path: Path) -> None:
    findings = preflight.survey(peers, LaunchSettings(), devices=False)
    assert {finding.state for finding in preflight.versions(findings)} == {"ok"}
    assert findings.addresses == (("127.0.0.1", "lo"),) * 2
    assert all(abs(seconds) < 5 for seconds in findings.offsets_seconds)
    assert [finding.state for finding in preflight.reachable(peers, findings)] == ["ok", "ok"]
    (tmp_path / "model.py").write_text("x = 1\n")
    shared = list(preflight.same_files(peers, tmp_path, [tmp_path / "model.py"]))
    assert [finding.state for finding in shared] == ["ok"] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["model.py"]


def test_a_question_without_an_answer_is_an_error_with_its_host(peers: SshPeers) -> None:
    with pytest.raises(RunError, match="nosuch") as caught:
        preflight.survey(peers, LaunchSettings(interface="nosuch"), devices=False)
    assert "--interface" in caught.value.remedy and caught.value.where.startswith("host ")


@pytest.mark.parametrize("ask", [protocol.Ask("meaning", {}), protocol.Ask("clock", {"of": "the tower"})])
def test_an_unknown_question_is_refused(ask: protocol.Ask, tmp_path: Path) -> None:
    refused = answer(ask, RankHost(tmp_path, lambda message: None))
    assert isinstance(refused, protocol.Fail) and f"no answer to '{ask.question}'" in refused.what


def test_a_killed_peer_is_named(peers: SshPeers) -> None:
    preflight.survey(peers, LaunchSettings(), devices=False)
    peers.peers[1].process.kill()
    with pytest.raises(RunError, match=r"the process on 127.0.0.1 is gone \(killed by signal 9\)"):
        preflight.survey(peers, LaunchSettings(), devices=False)


def runs(process: psutil.Process) -> bool:
    """Return whether a process runs. One that has lost its parent stays a zombie until process 1 notices."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_peer_ends_with_its_stdin(peers: SshPeers) -> None:
    preflight.survey(peers, LaunchSettings(), devices=False)  # the fork server imports torch meanwhile
    left = [child for peer in peers.peers for child in psutil.Process(peer.process.pid).children(recursive=True)]
    assert left
    for peer in peers.peers:
        Peer.close(peer)
        assert peer.process.wait(under_load(3.0)) == 1
    wait_until(lambda: not any(map(runs, left)), 1.0)


def impatient(assignment: str) -> subprocess.Popen[bytes]:
    """Start a peer in which a constant has another value."""
    pipe = subprocess.PIPE
    start = f"from autopipe.launch.remote import peer, protocol; {assignment}; peer.main()"
    return subprocess.Popen([sys.executable, "-c", start], stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe)


def test_a_peer_that_hears_nothing_ends() -> None:
    with impatient("protocol.SILENCE_SECONDS = 0.5") as process:
        assert process.wait(under_load(10.0)) == 1
        assert process.stderr is not None and b"nothing was heard" in process.stderr.read()


def is_fork_server(process: psutil.Process) -> bool:
    return "multiprocessing.forkserver" in " ".join(process.cmdline())


def test_a_peer_ends_with_its_stdin_while_it_waits_for_the_fork_server(tmp_path: Path) -> None:
    spec = WorkerSpec(
        run=str(tmp_path), rank=0, world_size=1, store="", heartbeats="", body="train", timeout_seconds=60.0
    )
    with impatient("peer.LEAVE_SECONDS = 0.2") as process:
        assert process.stdin is not None
        process.stdin.write(protocol.encode(first_question(devices=False)))
        process.stdin.flush()
        peer = psutil.Process(process.pid)
        wait_until(lambda: any(map(is_fork_server, peer.children())), 10.0)
        children = peer.children()  # also multiprocessing's resource tracker
        next(filter(is_fork_server, children)).suspend()
        process.stdin.write(protocol.encode(protocol.Start(1, (spec,))))
        process.stdin.close()
        process.wait(under_load(5.0))
        wait_until(lambda: not any(map(runs, children)), 1.0)


def test_doctor_reports_an_unreachable_host_as_a_finding() -> None:
    settings = LaunchSettings(hosts=(Host("localhost"),), remote_python="/nonexistent/python")
    (findings,) = examine_hosts(settings).findings
    assert findings.state == "problem" and "--remote-python" in findings.fix

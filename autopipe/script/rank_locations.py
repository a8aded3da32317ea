"""Where the ranks of ``autopipe run`` are: on this host, on hosts that ssh reaches, or in processes of a cluster.

::

    local  a process that this one starts, with a socket pair
    ssh    ssh HOST python -m autopipe.script.rank.joining: the socket pair is ssh's stdin and stdout
    env    rank 0 is local; every other process that the cluster started connects to this one over TCP

A rank that joins sends one line first: a mark and its facts, as JSON. What a login shell prints before it is ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autopipe.errors import RunError
from autopipe.launch.forwarding import forwarded
from autopipe.launch.remote import host_description, network, preflight
from autopipe.launch.remote.hosts import HERE
from autopipe.launch.remote.protocol import GATHER_SECONDS
from autopipe.launch.remote.ssh_peers import START_SECONDS, SshPeers, command_of, started
from autopipe.launch.request import LaunchSettings
from autopipe.users_code import is_own_file

if TYPE_CHECKING:
    import subprocess

    from autopipe.script.rank.server import RankProcess, RankServer


MARK = b"autopipe-rank "
# of the line, and of what a login shell prints before it
_MOST_BYTES = 1 << 16
_HELLO_SECONDS = 30.0
JOINING = "autopipe.script.rank.joining"


@dataclass(slots=True)
class Connection:
    """One rank, from the side of the controller."""

    end: socket.socket
    # which ends with the rank; None: another process started it
    process: subprocess.Popen[bytes] | RankProcess | None = None
    host: str = ""  # "": this one
    joins: bool = False  # it sends its facts first, and has no folder in common with the controller


@dataclass(slots=True)
class Places:
    """The places of all ranks of a run."""

    count: int
    settings: LaunchSettings = field(default_factory=LaunchSettings)
    hosts: tuple[str, ...] = ()  # of each rank, with ssh
    meeting: socket.socket | None = None  # where the processes of a cluster connect
    seen_as: str = ""  # the address of this host, as another one sees it
    server: RankServer | None = None  # from which ranks of this host are forked; None: each is a new process

    @property
    def are_remote(self) -> bool:
        """Whether ranks exchange values over TCP."""
        return bool(self.hosts) or self.meeting is not None

    @property
    def address(self) -> str:
        """The address on which rank 0 listens; "": the one at which its host was reached."""
        if self.meeting is not None:
            return str(self.meeting.getsockname()[0])
        return self.seen_as if self.hosts[0] in HERE and not self.settings.interface else ""

    def check(self) -> list[str]:
        """Check the hosts that ssh reaches, before the script starts; return notes about them. Raises: RunError."""
        return check(self.hosts, self.settings) if self.hosts else []

    def connect(
        self, local: Callable[[int], Connection], timeout: float, needed_bytes: Sequence[int] = ()
    ) -> list[Connection]:
        """Return the connections to all ranks.

        ``local``: starts a rank here. ``timeout``: seconds of silence. ``needed_bytes``: the memory of each rank.

        Raises: RunError if a rank does not join, or its host has other versions, modules or too little memory.
        """
        if self.meeting is not None:
            joined = _joined(self.meeting, self.count)
            return [local(0), *(joined[rank] for rank in range(1, self.count))]
        if not self.hosts:
            return [local(rank) for rank in range(self.count)]
        _check_start(self.hosts, self.settings, needed_bytes)
        connections: list[Connection] = []
        try:
            for rank, host in enumerate(self.hosts):
                connections.append(self._over_ssh(rank, host, timeout))
            for rank, connection in enumerate(connections):
                there = _hello_of(connection.end, rank, connection.host, START_SECONDS)
                _refuse_other_versions(there, connection.host)
                self.seen_as = self.seen_as or str(there["reached_from"])
        except BaseException:
            for connection in connections:
                assert connection.process is not None, "ssh started it"
                connection.process.kill()
                connection.process.wait()
            raise
        return connections

    def _over_ssh(self, rank: int, host: str, timeout: float) -> Connection:
        # what the rank prints is on ssh's stderr: stdout belongs to the messages
        here, process = started(command_of(host, self.settings, JOINING))
        task = {
            "rank": rank,
            "count": self.count,
            "timeout": timeout,
            "folder": str(Path.cwd()),
            "environment": forwarded(os.environ),
            "interface": self.settings.interface,
        }
        with contextlib.suppress(OSError):  # ssh has ended, which the next read notices
            here.sendall(json.dumps(task).encode() + b"\n")
        return Connection(here, process, host, joins=True)

    def end(self, *, failed: bool) -> None:
        """Let processes that have not joined end: a script that trains nothing needs no ranks."""
        if self.meeting is None:
            return
        from autopipe.script.wire import Wire

        with self.meeting:
            if failed:
                return
            try:
                joined = _joined(self.meeting, self.count)
            except RunError:  # the script has ended well without them
                return
            for connection in joined.values():
                wire = Wire(connection.end)
                wire.send(["end"])
                wire.close()


def keep_alive(end: socket.socket) -> None:
    """Let the kernel find out within half a minute that the other host has lost its power or its network."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the files of a folder of stage files, as bytes, for a rank on another host."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {path.name: torch.tensor(list(path.read_bytes()), dtype=torch.uint8, device="cpu") for path in files}


def hello(rank: int) -> bytes:
    """Return the line that a rank sends when it joins."""
    return MARK + json.dumps({"rank": rank, **host_description.collect(devices=False)}).encode() + b"\n"


def _joined(meeting: socket.socket, count: int) -> dict[int, Connection]:
    """Wait for all ranks but the first. Raises: RunError that names those that did not connect."""
    joined: dict[int, Connection] = {}
    end = time.monotonic() + GATHER_SECONDS
    while len(joined) < count - 1:
        meeting.settimeout(max(end - time.monotonic(), 0.001))
        try:
            connection, _ = meeting.accept()
        except TimeoutError:
            missing = [str(rank) for rank in range(1, count) if rank not in joined]
            raise RunError(
                f"rank {', '.join(missing)} did not connect within {GATHER_SECONDS:.0f} s",
                remedy="see the launcher's output for these ranks",
            ) from None
        try:
            there = _hello_of(connection, -1, "", _HELLO_SECONDS)
        except RunError:  # another program
            connection.close()
            continue
        rank, host = there.get("rank"), str(there.get("host_name"))
        if type(rank) is not int or not 0 < rank < count or rank in joined:
            connection.close()
            continue
        _refuse_other_versions(there, host)
        keep_alive(connection)
        joined[rank] = Connection(connection, None, host, joins=True)
    return joined


def _hello_of(end: socket.socket, rank: int, host: str, seconds: float) -> dict[str, Any]:
    """Return the facts that a rank sends first. Raises: RunError if it does not."""
    end.settimeout(seconds)
    received = bytearray()
    try:
        while len(received) < _MOST_BYTES:
            byte = end.recv(1)
            if not byte:
                break
            received += byte
            if byte == b"\n":
                line = bytes(received).rpartition(b"\n")[0].rpartition(b"\n")[2]
                if line.startswith(MARK):
                    end.settimeout(None)
                    answer = json.loads(line[len(MARK) :])
                    if isinstance(answer, dict):
                        return answer
    except (OSError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
    else:
        why = "its process ended" if len(received) < _MOST_BYTES else "it sent something else"
    raise RunError(
        f"rank {rank} did not start: {why}",
        where=host,
        remedy=f"try `ssh {host} {sys.executable} -c 'import autopipe'`; --remote-python names another interpreter",
    )


def _refuse_other_versions(there: dict[str, Any], host: str) -> None:
    preflight.first_problem(preflight.versions_of(host, there, host, there))


def check(hosts: Sequence[str], settings: LaunchSettings) -> list[str]:
    """Check that the hosts have the same versions and the folder of this process, and that they reach one another.

    ``hosts``: of the ranks. It returns notes, such as of clocks.

    Raises: RunError that names the host and what differs.
    """
    with _peers(hosts, settings) as peers:
        survey = preflight.survey(peers, settings, devices=False)
        findings = preflight.first_problem(preflight.versions(survey))
        for host, facts in zip(survey.hosts, survey.facts, strict=True):
            if not facts["folder"]:
                what = f"there is no folder {Path.cwd()} on this host"
                raise RunError(what, where=f"host {host}", remedy="put the script there")
        findings += preflight.first_problem(preflight.clocks(survey))
        if len(survey.hosts) > 1:
            for address, _ in survey.addresses:
                network.refuse_public(address, trusted=settings.trust_network)
            findings += preflight.first_problem(preflight.reachable(peers, survey))
    return [f"{finding.host}: {finding.name}: {finding.detail}" for finding in findings if finding.state == "note"]


def _check_start(hosts: Sequence[str], settings: LaunchSettings, needed_bytes: Sequence[int]) -> None:
    """Compare the script's modules with those of the hosts, and their free memory with what the ranks need.

    ``hosts``: of the ranks. ``needed_bytes``: predicted for each rank, or empty.

    Raises: RunError that names the host and both values.
    """
    with _peers(hosts, settings) as peers:
        survey = preflight.survey(peers, settings, devices=False)
        needed = [
            [size for host, size in zip(hosts, needed_bytes, strict=False) if host == name] for name in survey.hosts
        ]
        preflight.first_problem(preflight.same_modules(peers, _own_modules()))
        preflight.first_problem(preflight.memory(survey, needed, devices=False))


def _own_modules() -> list[Path]:
    """Return the files of the script and of the modules that it has imported, but for installed packages."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return sorted({Path(file).absolute() for file in files if isinstance(file, str) and is_own_file(file)})


def _peers(hosts: Sequence[str], settings: LaunchSettings) -> SshPeers:
    return SshPeers(list(dict.fromkeys(hosts)), settings)

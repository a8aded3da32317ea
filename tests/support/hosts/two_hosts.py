"""Hosts on one machine: network namespaces behind a bridge, each with an sshd. They share the disk, as with NFS.

::

    namespace PREFIXsw:      bridge br0
                              |        |
    namespaces PREFIX0, 1:  eth0      eth0        10.77.0.1, 10.77.0.2; sshd on port 22
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SSHD = "/usr/sbin/sshd"
_SECONDS = 20


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=_SECONDS).stdout


def why_not() -> str:
    """Return why the hosts cannot run on this machine, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "ssh", "ssh-keygen", "unshare") if shutil.which(name) is None]
    missing += [] if Path(SSHD).is_file() else [SSHD]
    if missing:
        return f"not installed: {', '.join(missing)} (make hosts-tools)"
    name = f"aptry{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "netns", "exec", name, "true")
    except (subprocess.SubprocessError, OSError) as error:
        return f"no network namespaces: {getattr(error, 'stderr', '') or error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_SECONDS, check=False)
    return ""


@dataclass(frozen=True)
class Hosts:
    """The hosts h0, h1, ... ``config``: the file for ``ssh -F``."""

    prefix: str
    names: tuple[str, ...]
    config: Path

    def namespace(self, index: int) -> str:
        return f"{self.prefix}{index}"

    def inside(self, index: int, *words: str) -> list[str]:
        """Return the command that runs another command on a host."""
        return ["ip", "netns", "exec", self.namespace(index), *words]

    def address(self, index: int) -> str:
        return f"10.77.0.{index + 1}"

    def link(self, index: int, state: str) -> None:
        """Set the network link of a host "down" or "up"."""
        run("ip", "-n", self.namespace(index), "link", "set", "eth0", state)

    def processes(self, index: int) -> list[psutil.Process]:
        """Return the processes on a host, without sshd and zombies."""
        alive = []
        for pid in run("ip", "netns", "pids", self.namespace(index)).split():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(int(pid))
                if process.status() != psutil.STATUS_ZOMBIE and not process.name().startswith("sshd"):
                    alive.append(process)
        return alive

    def ranks(self, index: int) -> dict[int, psutil.Process]:
        """Return the ranks of a host, identified by their logs; a process of a rank with its log comes after it."""
        by_rank = {}
        for process in self.processes(index):
            with contextlib.suppress(psutil.Error):
                logs = [f.path for f in process.open_files() if "/logs/rank_" in f.path]
                if logs:
                    by_rank.setdefault(int(Path(logs[0]).stem.removeprefix("rank_")), process)
        return by_rank

    def listening(self, index: int) -> set[str]:
        """Return the addresses with listening sockets on a host, without sshd."""
        words = (line.split() for line in run(*self.inside(index, "ss", "-Hltn")).splitlines())
        return {word[3].rpartition(":")[0] for word in words if not word[3].endswith(":22")}

    def peer(self, index: int) -> psutil.Process:
        """Return the process that started the ranks of a host."""
        peers = [p for p in self.processes(index) if "autopipe.launch.remote.peer" in words(p)]
        return next(p for p in peers if Path(p.exe()).name.startswith("python"))


def words(process: psutil.Process) -> list[str]:
    """Return the command line of a process, or [] once it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _sshd_config(folder: Path) -> str:
    return "\n".join(
        [
            "Port 22",
            f"HostKey {folder}/hostkey",
            f"AuthorizedKeysFile {folder}/authorized_keys",
            "PidFile none",
            "UsePAM no",
            "StrictModes no",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "",
        ]
    )


def _ssh_config(folder: Path, names: Sequence[str]) -> str:
    lines = []
    for index, name in enumerate(names):
        lines += [f"Host {name}", f" HostName 10.77.0.{index + 1}"]
    lines += [
        "Host *",
        " User root",
        f" IdentityFile {folder}/id",
        " IdentitiesOnly yes",
        f" UserKnownHostsFile {folder}/known_hosts",
        " StrictHostKeyChecking yes",
        "",
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def two_hosts(folder: Path, count: int = 2) -> Iterator[Hosts]:
    """Create the hosts, and remove them with all their processes."""
    prefix = f"ap{os.getpid() % 100000}x"
    names = tuple(f"h{index}" for index in range(count))
    hosts = Hosts(prefix, names, folder / "ssh_config")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    for key in ("id", "hostkey"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
    (folder / "authorized_keys").write_text((folder / "id.pub").read_text())
    key = " ".join((folder / "hostkey.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text("".join(f"{n},10.77.0.{i + 1} {key}\n" for i, n in enumerate(names)))
    (folder / "sshd_config").write_text(_sshd_config(folder))
    hosts.config.write_text(_ssh_config(folder, names))
    Path("/run/sshd").mkdir(exist_ok=True)
    switch, daemons = f"{prefix}sw", []
    with contextlib.ExitStack() as undo:
        undo.callback(_take_down, switch)
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "set", "lo", "up")
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for index, name in enumerate(names):
            namespace = hosts.namespace(index)
            undo.callback(_take_down, namespace)
            run("ip", "netns", "add", namespace)
            # the hostname resolves to an address that no other host can reach, as on Debian
            files = Path("/etc/netns") / namespace
            files.mkdir(parents=True)
            (files / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename} {name}\n")
            pair = f"p{index}"
            run(
                "ip",
                "link",
                "add",
                f"{prefix}v{index}",
                "netns",
                namespace,
                "type",
                "veth",
                "peer",
                pair,
                "netns",
                switch,
            )
            run("ip", "-n", switch, "link", "set", pair, "master", "br0", "up")
            run("ip", "-n", namespace, "link", "set", "lo", "up")
            run("ip", "-n", namespace, "link", "set", f"{prefix}v{index}", "name", "eth0")
            run("ip", "-n", namespace, "addr", "add", f"{hosts.address(index)}/24", "dev", "eth0")
            run("ip", "-n", namespace, "link", "set", "eth0", "up")
            log = undo.enter_context((folder / f"sshd{index}.log").open("w"))
            command = hosts.inside(index, SSHD, "-D", "-e", "-f", str(folder / "sshd_config"))
            daemons.append(subprocess.Popen(command, stdout=log, stderr=log))
        undo.callback(_end, daemons)
        for index in range(count):
            _await_sshd(hosts, index)
        yield hosts


def _await_sshd(hosts: Hosts, index: int) -> None:
    """Wait until an sshd answers."""
    words = ["ssh", "-F", str(hosts.config), "-o", "BatchMode=yes", "-o", "ConnectionAttempts=10", "--"]
    run(*hosts.inside(0, *words, hosts.names[index], "true"))


def _end(daemons: Sequence[subprocess.Popen[bytes]]) -> None:
    for daemon in daemons:
        daemon.terminate()
        daemon.wait(_SECONDS)


def _take_down(namespace: str) -> None:
    done = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    for pid in done.stdout.split():
        with contextlib.suppress(psutil.Error):
            psutil.Process(int(pid)).kill()
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=_SECONDS, check=False)
    shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)

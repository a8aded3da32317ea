"""The agents of all hosts at once: start them, ask them, hear them, and notice which one is gone."""

from __future__ import annotations

import os
import selectors
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopipe.errors import RunError
from autopipe.launch.remote.agent_process import Link
from autopipe.launch.remote.hosts import HERE
from autopipe.launch.request import LaunchSettings

# a host that has said nothing for so long is lost; its agent speaks every half second
LOST_SECONDS = 6.0
BEAT_SECONDS = 2.0
START_SECONDS = 60.0
# ssh's exit code for its own failures, and for a remote command that a signal ended
_SSH_FAILED = 255
_MODULE = ("-P", "-m", "autopipe.launch.remote.agent")
# what a host is told of this process's environment: settings of the numerics and of the network, no secrets
FORWARDED = ("GLOO_", "NCCL_", "OMP_", "MKL_", "TORCH_", "PYTHONHASHSEED", "PYTHONPATH", "AUTOPIPE_")
_OPTIONS = ("BatchMode=yes", "ServerAliveInterval=2", "ServerAliveCountMax=2", "ConnectTimeout=10")


def command_of(host: str, settings: LaunchSettings) -> tuple[str, ...]:
    """Return the words that start the agent on a host. This machine itself needs no ssh.

    The remote shell reads one word, made of the interpreter's path and constants, each quoted; what is to be done
    travels on stdin, where no shell and no list of processes sees it.
    """
    agent = (settings.remote_python or sys.executable, *_MODULE)
    if host in HERE:
        return agent
    config = ("-F", str(settings.ssh_config)) if settings.ssh_config is not None else ()
    options = [word for option in _OPTIONS for word in ("-o", option)]
    return ("ssh", *config, "-T", *options, "--", host, shlex.join(agent))


def hello(host: str, *, devices: bool) -> dict[str, Any]:
    """Return the first message. ``devices``: whether the GPUs are to be looked at."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    return {"kind": "hello", "host": host, "cwd": str(Path.cwd()), "environment": environment, "devices": devices}


class Agents:
    """The agents of some hosts. ``links``: in the order of the hosts."""

    def __init__(self, hosts: Sequence[str], settings: LaunchSettings) -> None:
        self.python = settings.remote_python or sys.executable
        self.links: list[Link] = []
        self._lost: dict[int, str] = {}
        self._waiting: list[tuple[int, dict[str, Any]]] = []
        self._beaten = time.monotonic()
        for host in hosts:
            command = command_of(host, settings)
            try:
                self.links.append(Link(host, command))
            except OSError as error:
                self.close()
                remedy = "install OpenSSH's client" if command[0] == "ssh" else "check --remote-python"
                raise RunError(f"{command[0]} cannot be started: {error.strerror}", remedy=remedy) from None

    def hear(self, timeout: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """Return (host's index, message) of what has arrived within ``timeout`` seconds.

        Once for each host that is gone: ``{"kind": "gone", "message", "remedy"}``.
        """
        waiting, self._waiting = self._waiting, []
        yield from waiting
        self._beat()
        with selectors.DefaultSelector() as selector:
            for link in self.links:
                for stream in link.streams():
                    selector.register(stream, selectors.EVENT_READ)
                if link.unsent:
                    selector.register(link.stdin, selectors.EVENT_WRITE)
            if selector.get_map():
                selector.select(0 if waiting else timeout)
        for index, link in enumerate(self.links):
            if index in self._lost:
                continue
            link.flush()
            for message in link.receive():
                yield index, message
            gone = self._gone(link)
            if gone:
                self._lost[index] = gone[0]
                yield index, {"kind": "gone", "message": gone[0], "remedy": gone[1]}

    def _beat(self) -> None:
        if time.monotonic() - self._beaten > BEAT_SECONDS:
            self._beaten = time.monotonic()
            self.tell({"kind": "beat"})

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message to every host that is not lost."""
        for index, link in enumerate(self.links):
            if index not in self._lost:
                link.send(message)

    def ask(
        self, messages: Mapping[int, Mapping[str, Any]], answer: str, seconds: float = START_SECONDS
    ) -> dict[int, dict[str, Any]]:
        """Send a message to each of some hosts and return their answers, which are of one kind.

        Raises: RunError for the first host that refuses, is gone, or does not answer in time.
        """
        for index, message in messages.items():
            self.links[index].send(message)
        answers: dict[int, dict[str, Any]] = {}
        other: list[tuple[int, dict[str, Any]]] = []
        end = time.monotonic() + seconds
        while len(answers) < len(messages):
            for index, message in self.hear(0.1):
                if message["kind"] == answer and index in messages:
                    answers[index] = message
                elif message["kind"] == "refused":
                    raise RunError(
                        message["message"],
                        where=message["where"] or f"host {self.links[index].host}",
                        remedy=message["remedy"],
                    )
                elif message["kind"] == "gone":
                    raise RunError(message["message"], where=f"host {self.links[index].host}", remedy=message["remedy"])
                elif message["kind"] != "beats":
                    other.append((index, message))
            if time.monotonic() > end:
                late = [self.links[index].host for index in messages if index not in answers]
                raise RunError(f"no answer from {', '.join(late)} within {seconds:.0f} s", remedy="check these hosts")
        self._waiting += other
        return answers

    def _gone(self, link: Link) -> tuple[str, str] | None:
        """Return why a host is gone and what to try, None where it is there."""
        if not link.ended:
            if time.monotonic() - link.heard < LOST_SECONDS + (0 if link.spoken else START_SECONDS):
                return None
            return (
                f"host {link.host} does not answer any more: nothing heard for {time.monotonic() - link.heard:.0f} s",
                "check the machine and its network; its ranks end by themselves when they hear nothing",
            )
        ssh, code = link.command[0] == "ssh", link.exit_code()
        said = link.errors.splitlines()[-1] if link.errors else ""
        if not link.spoken and code is not None and code < 0:
            return (
                f"{link.command[0]}, which starts the agent on {link.host}, was killed by signal {-code}",
                "somebody or the kernel ended it on this machine: look at its log, and start again",
            )
        if not link.spoken and not (ssh and code == _SSH_FAILED):
            return (
                f"the agent cannot be started on {link.host}: {said or f'exit code {code}'}",
                f"install autopipe there for {self.python}, or name another Python with --remote-python",
            )
        if ssh and code == _SSH_FAILED and said:
            return f"ssh to {link.host} failed: {said}", f"check: ssh {link.host} true"
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        if ssh and code == _SSH_FAILED:
            how = "killed there, or its connection was closed"
        return (
            f"the agent on {link.host} is gone ({how}){f': {said}' if said else ''}",
            "somebody or the kernel ended it; look at that machine's log",
        )

    def close(self) -> None:
        """End all agents, and with them their ranks; a host that is lost is left to itself."""
        self.tell({"kind": "end"})
        for index, link in enumerate(self.links):
            if index in self._lost:
                link.process.kill()
        for link in self.links:
            link.close()

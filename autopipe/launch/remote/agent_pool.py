"""The agents of all hosts: starts them, asks them questions, keeps their connections alive, and ends them."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autopipe.errors import RunError
from autopipe.launch.forwarding import forwarded
from autopipe.launch.remote import protocol
from autopipe.launch.remote.agent_process import AgentProcess
from autopipe.launch.remote.connections import Connections, Lost
from autopipe.launch.remote.hosts import HERE
from autopipe.launch.request import LaunchSettings

_AGENT = "autopipe.launch.remote.agent"
_OPTIONS = ("BatchMode=yes", "ServerAliveInterval=2", "ServerAliveCountMax=2", "ConnectTimeout=10")


def command_of(host: str, settings: LaunchSettings, module: str = _AGENT) -> tuple[str, ...]:
    """Return the command that starts the agent, or another module, on a host. This machine needs no ssh.

    The remote shell reads one word: the interpreter's path and constants, each quoted. The instructions follow on
    stdin, where neither a shell nor the list of processes sees them.
    """
    agent = (settings.remote_python or sys.executable, "-P", "-m", module)
    if host in HERE:
        return agent
    config = ("-F", str(settings.ssh_config)) if settings.ssh_config is not None else ()
    options = [word for option in _OPTIONS for word in ("-o", option)]
    return ("ssh", *config, "-T", *options, "--", host, shlex.join(agent))


def prepare_message(*, devices: bool) -> protocol.Prepare:
    """Return the first message to an agent. ``devices``: whether it describes the GPUs."""
    return protocol.Prepare(cwd=str(Path.cwd()), environment=forwarded(os.environ), devices=devices)


class AgentPool(Connections):
    """The agents of some hosts, in the order of the hosts."""

    def __init__(self, hosts: Sequence[str], settings: LaunchSettings) -> None:
        """Start an agent on each host. Raises: RunError if ssh or the agent cannot be started."""
        self.agents: list[AgentProcess] = []
        super().__init__(self.agents)
        self._kept_alive = time.monotonic()
        for host in hosts:
            command = command_of(host, settings)
            try:
                self.agents.append(AgentProcess(host, command, settings.remote_python or sys.executable))
            except OSError as error:
                self.close()
                remedy = "install OpenSSH's client" if command[0] == "ssh" else "check --remote-python"
                raise RunError(f"{command[0]} cannot be started: {error.strerror}", remedy=remedy) from None

    def receive(self, timeout: float, also: Sequence[Any] = ()) -> Iterator[tuple[int, protocol.Message | Lost]]:
        """Return what arrives, as ``Connections`` does, and show the agents that this process is alive."""
        if time.monotonic() - self._kept_alive > protocol.KEEP_ALIVE_SECONDS:
            self._kept_alive = time.monotonic()
            self.send(protocol.KeepAlive())
        yield from super().receive(timeout, also)

    def close(self) -> None:
        """End all agents, and with them their ranks. The agent on a lost host ends its ranks."""
        self.send(protocol.End())
        present = self.present
        for index, agent in enumerate(self.agents):
            if index not in present:
                agent.kill()
        for agent in self.agents:
            agent.close()

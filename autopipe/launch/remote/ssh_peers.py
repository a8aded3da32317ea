"""Peers that ssh starts, one a host: the command, the processes of ssh, questions to the hosts, and the end of all."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from autopipe import __version__
from autopipe.errors import RunError
from autopipe.launch.forwarding import forwarded
from autopipe.launch.remote import protocol
from autopipe.launch.remote.connections import Connections, Lost, Peer
from autopipe.launch.remote.hosts import HERE
from autopipe.launch.remote.stream import MessageStream
from autopipe.launch.request import LaunchSettings

_PEER = "autopipe.launch.remote.peer"
_OPTIONS = ("BatchMode=yes", "ServerAliveInterval=2", "ServerAliveCountMax=2", "ConnectTimeout=10")
_LONGEST_ERRORS = 4000
_EXIT_SECONDS = 2.0
START_SECONDS = 300.0  # for ranks to start: importing torch from a slow disk takes minutes
# ssh's exit code for its own failures, and for a remote command that a signal ended
_SSH_FAILED = 255


def command_of(host: str, settings: LaunchSettings, module: str = _PEER) -> tuple[str, ...]:
    """Return the command that starts a peer, or another module, on a host. This machine needs no ssh.

    The remote shell reads one word: the interpreter's path and constants, each quoted. The instructions follow on
    stdin, where neither a shell nor the list of processes sees them.
    """
    words = (settings.remote_python or sys.executable, "-P", "-m", module)
    if host in HERE:
        return words
    config = ("-F", str(settings.ssh_config)) if settings.ssh_config is not None else ()
    options = [word for option in _OPTIONS for word in ("-o", option)]
    return ("ssh", *config, "-T", *options, "--", host, shlex.join(words))


def started(command: Sequence[str], stderr: IO[bytes] | None = None) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start such a command; return the connection to its stdin and stdout, and its process. Raises: RunError."""
    here, there = socket.socketpair()
    with there:
        try:
            # in a new session, so that Ctrl-C in the terminal reaches this process and not ssh
            process = subprocess.Popen(
                command, stdin=there.fileno(), stdout=there.fileno(), stderr=stderr, start_new_session=True
            )
        except OSError as error:
            here.close()
            remedy = "install OpenSSH's client" if command[0] == "ssh" else "check --remote-python"
            raise RunError(f"{command[0]} cannot be started: {error.strerror}", remedy=remedy) from None
    return here, process


def first_question(*, devices: bool) -> protocol.Ask:
    """Return the first message to a peer. ``devices``: whether it describes the GPUs."""
    folder, environment = str(Path.cwd()), forwarded(os.environ)
    return protocol.Ask("prepare", {"folder": folder, "environment": environment, "devices": devices})


class SshPeer(Peer):
    """The connection to the peer of one host: the stdin and stdout of ssh, or of the peer itself on this machine."""

    def __init__(self, host: str, settings: LaunchSettings) -> None:
        """Start it. Raises: RunError if ssh or the interpreter cannot be started."""
        self._command, self._python = command_of(host, settings), settings.remote_python or sys.executable
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # see close
        try:
            end, self.process = started(self._command, self._errors)
        except RunError:
            self._errors.close()
            raise
        # a login shell may print a greeting, which is not a message
        super().__init__(host, MessageStream(end, end, strict=False))
        self._heard = 0.0  # when a message arrived last
        self._beats = False  # whether its ranks have begun: it sends heartbeats each second

    def receive(self) -> Sequence[protocol.Message]:
        """Return the messages that have arrived."""
        messages = super().receive()
        if messages:
            self._heard = time.monotonic()
            self._beats = self._beats or any(isinstance(message, protocol.Beats) for message in messages)
        return messages

    def lost(self) -> Lost | None:
        """Return why the host is lost, None while it answers."""
        silence = time.monotonic() - self._heard
        if self._beats and silence > protocol.LOST_SECONDS:
            self.drop(f"the host does not answer any more, nothing heard for {silence:.0f} s")
        return self._explained() if self._reason else None

    def _explained(self) -> Lost:
        """Return how the process ended, or why it is considered lost."""
        ssh, code = self._command[0] == "ssh", self._exit_code(1.0)
        errors = self._errors.fileno()
        end = os.pread(errors, _LONGEST_ERRORS, max(os.fstat(errors).st_size - _LONGEST_ERRORS, 0))
        last = ["", *end.decode("utf-8", "replace").strip().splitlines()][-1]
        if code is None:
            return Lost(
                f"the process on {self.host} is lost: {self._reason}",
                "check the machine and its network; its ranks end by themselves when they hear nothing",
            )
        if ssh and code == _SSH_FAILED and last:
            return Lost(f"ssh to {self.host} failed: {last}", f"check: ssh {self.host} true")
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        if not self._heard and code < 0:
            return Lost(
                f"{self._command[0]}, which starts autopipe on {self.host}, was {how}",
                "a user or the kernel ended it on this machine: see its log, and start again",
            )
        if ssh and code == _SSH_FAILED:
            how = "killed there, or its connection was closed"
        elif not self._heard:
            return Lost(
                f"autopipe cannot be started on {self.host}: {last or how}",
                f"install autopipe {__version__} there for {self._python}, or name another Python with --remote-python",
            )
        return Lost(
            f"the process on {self.host} is gone ({how}){f': {last}' if last else ''}",
            "a user or the kernel ended it; see that machine's log",
        )

    def _exit_code(self, seconds: float) -> int | None:
        """Return the exit code of the process, None if it has not ended."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """End the process: by the end of its stdin, which a peer detects, else by force, as if its host is lost."""
        super().close()
        if self._reason or self._exit_code(_EXIT_SECONDS) is None:
            self.process.kill()
            self.process.wait()
        self._errors.close()


class SshPeers(Connections):
    """The peers of some hosts, in the order of the hosts. None is left after the context."""

    def __init__(self, hosts: Sequence[str], settings: LaunchSettings) -> None:
        """Start a peer on each host. Raises: RunError if ssh or the interpreter cannot be started."""
        self.peers: list[SshPeer] = []
        super().__init__(self.peers)
        self._kept_alive = time.monotonic()
        try:
            for host in hosts:
                self.peers.append(SshPeer(host, settings))
        except RunError:
            self.close()
            raise

    def __enter__(self) -> SshPeers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def receive(self, timeout: float, also: Sequence[Any] = ()) -> Iterator[tuple[int, protocol.Message | Lost]]:
        """Return what arrives, as ``Connections`` does, and show the hosts that this process is alive."""
        if time.monotonic() - self._kept_alive > protocol.KEEP_ALIVE_SECONDS:
            self._kept_alive = time.monotonic()
            self.send(protocol.KeepAlive())
        yield from super().receive(timeout, also)

    def ask(self, questions: Mapping[int, protocol.Ask]) -> dict[int, Any]:
        """Ask some hosts, each a question; return their answers, by index.

        Raises: RunError for the first host that refuses, is lost, or does not answer in time.
        """
        answers: dict[int, Any] = {}
        for index, message in self._replies(questions, protocol.ANSWER_SECONDS):
            if isinstance(message, protocol.Answer):
                answers[index] = message.value
        return answers

    def start(self, starts: Sequence[protocol.Start]) -> None:
        """Start the ranks of each host, and return when all hosts have started theirs, or reported why not.

        Raises: RunError for the first host that is lost, or does not start them in time.
        """
        for index, message in list(self._replies(dict(enumerate(starts)), START_SECONDS)):
            self.keep(index, message)  # such as the events of hosts that have started earlier

    def _replies(
        self, requests: Mapping[int, protocol.Message], seconds: float
    ) -> Iterator[tuple[int, protocol.Message]]:
        """Send a request to each of some hosts, and yield what they send until each has replied."""
        for index, request in requests.items():
            self.peers[index].send(request)
        waiting, end = set(requests), time.monotonic() + seconds
        while waiting:
            # a host may send more than one message: all that have arrived are yielded
            for index, message in list(self.receive(0.1)):
                where = f"host {self.peers[index].host}"
                if isinstance(message, protocol.Fail):
                    raise RunError(message.what, where=message.where or where, remedy=message.remedy)
                if isinstance(message, Lost):
                    raise RunError(message.message, where=where, remedy=message.remedy)
                if isinstance(message, (protocol.Answer, protocol.Beats, protocol.Event)):
                    waiting.discard(index)
                yield index, message
            if waiting and time.monotonic() > end:
                late = ", ".join(self.peers[index].host for index in sorted(waiting))
                raise RunError(f"no answer from {late} within {seconds:.0f} s", remedy="check these hosts")

    def ask_all(self, question: protocol.Ask) -> list[Any]:
        """Return the answers of all hosts to one question. Raises: RunError as ``ask``."""
        answers = self.ask(dict.fromkeys(range(len(self.peers)), question))
        return [answers[index] for index in range(len(self.peers))]

    def close(self) -> None:
        """End all peers, and with them their ranks. The peer of a lost host ends its ranks."""
        self.send(protocol.Finish(0))
        for peer in self.peers:
            peer.close()

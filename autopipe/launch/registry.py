"""The launchers by name. A new launcher is a module with the functions of ``Launcher``, and one entry here.

The module of a launcher is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from autopipe.errors import RunError, unknown_choice
from autopipe.launch.request import HostCommand, LaunchRequest

if TYPE_CHECKING:
    from autopipe.launch.remote.rendezvous import Rendezvous


class Launcher(Protocol):
    """The functions of a launcher's module."""

    def run_ranks(self, request: LaunchRequest, rendezvous: Rendezvous | None) -> None:
        """Start the ranks and return when all are done. No rank is left running, however this returns.

        ``rendezvous``: the connections to the processes that a cluster's own launcher started, if one did.
        """

    def commands(self, request: LaunchRequest) -> list[HostCommand]:
        """Return the commands that ``run_ranks`` would run, without running them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One launcher."""

    load: Callable[[], Launcher] | None  # None: the command runs again elsewhere, once a rank, with --launcher env
    stops_gracefully: bool = False  # a signal to this process makes the ranks finish a minibatch and save


def _local() -> Launcher:
    from autopipe.launch import local

    return local


def _ssh() -> Launcher:
    from autopipe.launch import ssh

    return ssh


def _env() -> Launcher:
    from autopipe.launch import env

    return env


LAUNCHERS: Mapping[str, Entry] = {
    "local": Entry(_local, stops_gracefully=True),
    "ssh": Entry(_ssh, stops_gracefully=True),
    "slurm": Entry(None),
    "env": Entry(_env, stops_gracefully=True),
}


def _launcher(request: LaunchRequest) -> Launcher:
    """Return the launcher that the settings name. Raises: RunError for one that runs the command again elsewhere."""
    name = request.settings.name
    entry = LAUNCHERS.get(name)
    if entry is None or entry.load is None:
        known = [known for known, other in LAUNCHERS.items() if other.load is not None]
        raise RunError(unknown_choice("launcher", name, known), remedy="choose one of them with --launcher")
    return entry.load()


def run_ranks(request: LaunchRequest, rendezvous: Rendezvous | None = None) -> None:
    """Start the ranks with the launcher that the settings name, and return when all are done.

    Raises: RunError if they cannot be started; WorkerError for the first failing rank.
    """
    _launcher(request).run_ranks(request, rendezvous)


def commands(request: LaunchRequest) -> list[HostCommand]:
    """Return the commands that would run, host by host. Raises: RunError if the ranks do not fit."""
    return _launcher(request).commands(request)

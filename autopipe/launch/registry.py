"""The launchers by name. Each is a module with two functions of one signature; it is imported when it is chosen.

::

    launch(request: Launch) -> None                      start the ranks, return when all are done, leave none behind
    commands(request: Launch) -> list[HostCommand]       what ``launch`` would run, without running it
"""

from __future__ import annotations

import importlib
from typing import Any

from autopipe.errors import RunError, unknown_choice
from autopipe.launch.request import HostCommand, Launch

LAUNCHERS = {
    "local": "autopipe.launch.local",
    "ssh": "autopipe.launch.ssh",
    "env": "autopipe.launch.env",
}
# those whose ranks can be asked to finish their minibatch; under the others a signal is not this process's to answer
STOPPABLE = ("local", "ssh", "env")


def _module(request: Launch) -> Any:
    name = request.settings.name
    if name not in LAUNCHERS:
        raise RunError(unknown_choice("launcher", name, LAUNCHERS), remedy="choose one of them with --launcher")
    return importlib.import_module(LAUNCHERS[name])


def launch(request: Launch) -> None:
    """Start the ranks with the launcher that the settings name.

    Raises: RunError where it cannot start them; WorkerError for the first failing rank.
    """
    _module(request).launch(request)


def commands(request: Launch) -> list[HostCommand]:
    """Return what would be run, host by host. Raises: RunError where it could not be."""
    found: list[HostCommand] = _module(request).commands(request)
    return found

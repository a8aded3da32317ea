"""What a launcher is asked for, and what it tells each rank. No torch: the command line can build these at once.

::

    LaunchSettings (what the user said) --+
    RunDirectory, ranks, what to do ------+--> Launch --launcher--> WorkerSpec for each rank, as JSON
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopipe.launch.rank.signals import StopRequest
from autopipe.launch.remote.identity import Membership
from autopipe.runtime.job import RunDirectory

if TYPE_CHECKING:
    from autopipe.launch.remote.rendezvous import Meeting

LOOPBACK = "lo"
STEPS_WITHOUT_PROGRESS = 20
LEAST_WATCHDOG_SECONDS = 60.0
SLOW_SECONDS = 300.0

OnEvent = Callable[[dict[str, Any]], None]
"""Takes the events of the ranks, and the ticks of the supervisor."""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that ranks run on, by the name under which ssh knows it. ``slots`` 0: its share of the ranks."""

    name: str
    slots: int = 0


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """How and where the ranks are started. ``launcher`` "": ssh where hosts are named, else local.

    ``remote_python`` "": the path of this process's interpreter. ``interface`` "": the one that leads to the first
    host. ``watchdog_seconds`` None: from the plan. ``trust_network``: an address of the public internet is accepted.
    ``here``, ``meeting``: which process this is under a cluster's own launcher, and rank 0's end of the rendezvous.
    """

    launcher: str = ""
    hosts: tuple[Host, ...] = ()
    remote_python: str = ""
    ssh_config: Path | None = None
    interface: str = ""
    trust_network: bool = False
    watchdog_seconds: float | None = None
    dry_run: bool = False
    here: Membership | None = None
    meeting: Meeting | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The launcher that is meant."""
        return self.launcher or ("ssh" if self.hosts else "local")


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of all ranks of a run. ``body``: ``train`` or ``evaluate``.

    ``batch_size``, ``evaluation_data`` (a TARGET): for ``evaluate``, in place of the run's own; 0 and "" leave them.
    ``averaged``: ``evaluate`` takes the averaged weights.
    ``stop``: whoever asks it asks the run to stop cleanly; without one, signals end it.
    """

    run: RunDirectory
    world_size: int
    on_event: OnEvent
    settings: LaunchSettings = LaunchSettings()
    watchdog_seconds: float = 300.0
    body: str = "train"
    batch_size: int = 0
    evaluation_data: str = ""
    averaged: bool = False
    stop: StopRequest | None = None

    @property
    def slow_seconds(self) -> float:
        """How long what is no instruction may take: building the model, reading data, saving. No plan predicts that."""
        if self.settings.watchdog_seconds is not None:
            return self.watchdog_seconds
        return max(self.watchdog_seconds, SLOW_SECONDS)

    @property
    def timeout_seconds(self) -> float:
        """How long a rank waits for another: longer than the watchdog, which knows more, takes to speak."""
        return max(self.watchdog_seconds * 2, self.slow_seconds + LEAST_WATCHDOG_SECONDS)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a launcher tells a rank; it travels as JSON. ``body`` and what follows it: as in ``Launch``.

    ``store``: where the ranks meet, ``file:///path`` or ``tcp://address:port``; for the latter rank 0 listens, on that
    address only. ``heartbeats``: the file of ``launch.rank.heartbeat``. ``interface``: the network interface that gloo
    uses; "" is the loopback for ranks that meet in a file, else the one that leads to the store. ``host``: for people.
    ``local_rank`` of ``local_world_size``: among the ranks of the same machine.
    """

    run: str
    rank: int
    world_size: int
    store: str
    heartbeats: str
    body: str
    timeout_seconds: float
    batch_size: int = 0
    evaluation_data: str = ""
    averaged: bool = False
    interface: str = ""
    host: str = ""
    local_rank: int = 0
    local_world_size: int = 1


@dataclass(frozen=True, slots=True)
class HostCommand:
    """What a launcher would run on a host: a command as a list of words, and the text it would be given on stdin.

    ``host`` "": this machine. ``note``: what a person should know, such as how a rank without a command starts.
    """

    host: str
    ranks: tuple[int, ...]
    command: tuple[str, ...]
    stdin: str = ""
    note: str = ""


def watchdog_of(step_seconds: float, said: float | None) -> float:
    """Return how long nothing may move before a hang is declared: what the user said, or twenty predicted steps."""
    if said is not None:
        return said
    return max(LEAST_WATCHDOG_SECONDS, STEPS_WITHOUT_PROGRESS * step_seconds)

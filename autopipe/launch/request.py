"""The request to a launcher, and the instructions for each rank. No torch: the command line builds these at once.

::

    LaunchSettings (the user's options) --+
    RunDirectory, ranks, the work --------+--> LaunchRequest --launcher--> a WorkerSpec for each rank, as JSON
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopipe.launch.remote.rank_environment import RankIdentity
from autopipe.runtime.job import RunDirectory
from autopipe.workers.signals import StopRequest

LOOPBACK = "lo"
STEPS_WITHOUT_PROGRESS = 20
LEAST_WATCHDOG_SECONDS = 60.0
SLOW_SECONDS = 300.0

OnEvent = Callable[[dict[str, Any]], None]
"""Takes the events of the ranks, and the ticks of the supervisor."""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that runs ranks."""

    name: str  # as ssh knows it
    slots: int = 0  # the number of ranks it takes; 0: an equal share


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """The user's options for how and where the ranks start."""

    launcher: str = ""  # "": ssh if hosts are named, else local
    hosts: tuple[Host, ...] = ()
    remote_python: str = ""  # the interpreter on the hosts; "": the path of this one
    ssh_config: Path | None = None  # None: the user's own ~/.ssh/config
    interface: str = ""  # the network interface between ranks; "": the one on the route to the first host
    trust_network: bool = False  # accept an address of the public internet
    watchdog_seconds: float | None = None  # None: derived from the plan
    dry_run: bool = False
    identity: RankIdentity | None = None  # this process's rank, if a cluster's own launcher started it

    @property
    def name(self) -> str:
        """The name of the launcher to use."""
        return self.launcher or ("ssh" if self.hosts else "local")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """One start of all ranks of a run."""

    run: RunDirectory
    world_size: int
    on_event: OnEvent
    settings: LaunchSettings = LaunchSettings()
    watchdog_seconds: float = 300.0
    body: str = "train"  # train or evaluate
    batch_size: int = 0  # of evaluate; 0: the run's own
    evaluation_data: str = ""  # of evaluate: a TARGET; "": the run's own
    averaged: bool = False  # evaluate the averaged weights
    model_files: tuple[Path, ...] = ()  # the user's own files, which must be the same on every host
    stop: StopRequest | None = None  # requests a graceful stop; None: signals end the run at once

    @property
    def slow_seconds(self) -> float:
        """The time limit for work without a predicted time: building the model, reading data, saving."""
        if self.settings.watchdog_seconds is not None:
            return self.watchdog_seconds
        return max(self.watchdog_seconds, SLOW_SECONDS)

    @property
    def timeout_seconds(self) -> float:
        """How long a rank waits for another: longer than the watchdog, whose report says more."""
        return max(self.watchdog_seconds * 2, self.slow_seconds + LEAST_WATCHDOG_SECONDS)

    def worker_spec(
        self,
        rank: int,
        *,
        store: str,
        heartbeats: str = "",
        interface: str = "",
        host: str = "",
        local_rank: int = 0,
        local_world_size: int = 1,
    ) -> WorkerSpec:
        """Return the instructions for one rank. The process that starts the rank adds the paths of its own host."""
        return WorkerSpec(
            run=str(self.run.path.resolve()),
            rank=rank,
            world_size=self.world_size,
            store=store,
            heartbeats=heartbeats,
            body=self.body,
            timeout_seconds=self.timeout_seconds,
            batch_size=self.batch_size,
            evaluation_data=self.evaluation_data,
            averaged=self.averaged,
            interface=interface,
            host=host,
            local_rank=local_rank,
            local_world_size=local_world_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The instructions of a launcher for one rank, sent as JSON."""

    run: str  # the run directory
    rank: int
    world_size: int
    store: str  # the rendezvous store: file:///path, or tcp://address:port on which rank 0 listens
    heartbeats: str  # the path of the heartbeat file; see launch.rank.heartbeat
    body: str  # train or evaluate
    timeout_seconds: float
    batch_size: int = 0  # this and the next two: as in LaunchRequest
    evaluation_data: str = ""
    averaged: bool = False
    interface: str = ""  # for gloo; "": loopback with a store in a file, else the interface on the route to the store
    host: str = ""  # the host's name in messages
    local_rank: int = 0  # among the ranks of the same host
    local_world_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCommand:
    """A command that a launcher would run on one host, for ``--dry-run``."""

    host: str = ""  # "": this machine
    ranks: tuple[int, ...]
    command: tuple[str, ...] = ()  # empty if the ranks start without a command
    stdin: str = ""
    note: str = ""  # for the user, such as how a rank without a command starts


GPU_RANK_CPUS = 8
"""CPUs of a rank on a GPU: its main thread, autograd, NCCL, gloo, the writing of checkpoints and the user's data."""


def cpus_of_rank(threads: int, *, gpus: bool) -> int:
    """Return the CPUs that a cluster reserves for a rank. ``threads``: those of its computation on a CPU."""
    return max(threads, GPU_RANK_CPUS) if gpus and threads == 1 else threads


def watchdog_of(step_seconds: float, requested: float | None) -> float:
    """Return the seconds without progress that count as a hang: those requested, or twenty predicted steps."""
    if requested is not None:
        return requested
    return max(LEAST_WATCHDOG_SECONDS, STEPS_WITHOUT_PROGRESS * step_seconds)

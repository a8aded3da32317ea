"""The placement of ranks on hosts: their default number, and (``--dry-run``) the commands for each host."""

from __future__ import annotations

from dataclasses import replace

from autopipe.commands.settings import TrainSettings
from autopipe.commands.store import Store
from autopipe.launch.registry import commands
from autopipe.launch.remote.hosts import total_slots
from autopipe.launch.request import HostCommand, LaunchRequest
from autopipe.runtime.job import RunDirectory


def placed(settings: TrainSettings) -> TrainSettings:
    """Return the settings with one rank per slot of the hosts, if the number of ranks is not given."""
    slots = total_slots(settings.launch.hosts)
    if settings.plan.gpus is not None or slots is None:
        return settings
    return replace(settings, plan=replace(settings.plan, gpus=slots))


def rehearse(settings: TrainSettings) -> list[HostCommand]:
    """Return the commands of a run. The number of ranks is the given one, else that of the stored plan.

    Raises: ArtifactError if no plan is stored either; RunError if the ranks do not fit on the hosts.
    """
    world = placed(settings).plan.gpus or Store(settings.plan.work_dir).stored_plan()[0].num_processes
    path = settings.run_dir or settings.plan.work_dir / "runs" / "DATE"
    return commands(
        LaunchRequest(run=RunDirectory(path), world_size=world, on_event=lambda event: None, settings=settings.launch)
    )

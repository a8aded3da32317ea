"""Ranks on hosts: their default number, the commands for each host (``--dry-run``), and a cluster's own launcher.

Under a cluster's own launcher, the command runs once per rank: rank 0 leads, the others follow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

from autopipe.commands.settings import TrainSettings
from autopipe.commands.store import Store
from autopipe.launch.registry import commands
from autopipe.launch.remote.hosts import total_slots
from autopipe.launch.remote.rank_environment import RankIdentity, read_identity
from autopipe.launch.remote.rendezvous import Rendezvous
from autopipe.launch.request import HostCommand, LaunchRequest
from autopipe.runtime.job import RunDirectory

ENVIRONMENT = "env"


def with_identity(settings: TrainSettings, environment: Mapping[str, str]) -> TrainSettings:
    """Return the settings with this process's identity among the ranks, if a launcher sets it in the environment.

    Raises: RunError that names a missing or invalid variable.
    """
    if settings.launch.name != ENVIRONMENT:
        return settings
    return replace(settings, launch=replace(settings.launch, identity=read_identity(environment)))


def is_follower(settings: TrainSettings) -> bool:
    """Return whether this process is a rank other than 0, which neither prepares nor prints."""
    return settings.launch.identity is not None and settings.launch.identity.rank > 0


def follow(settings: TrainSettings) -> int:
    """Run as a non-zero rank until the job ends; return its exit code.

    Raises: AutopipeError with the first failure of any rank.
    """
    from autopipe.launch import env

    assert settings.launch.identity is not None, "only a rank follows"
    return env.follow(settings.launch.identity, settings.launch)


@contextlib.contextmanager
def lead(settings: TrainSettings) -> Iterator[tuple[TrainSettings, Rendezvous | None]]:
    """Run as rank 0 and yield the settings and the connections to the other ranks' processes, if there are any.

    If the body raises, the other ranks end with the same error.

    Raises: RunError if the options request another number of ranks than there are.
    """
    here = settings.launch.identity
    if here is None:
        yield settings, None
        return
    from autopipe.launch import env

    with env.lead(here, settings.launch) as rendezvous:
        env.refuse_other_number(here, settings.plan.gpus)
        # every rank runs already: a plan with replicas may leave some unused, so it must be requested
        replicas = settings.plan.replicas or "never"
        led = replace(settings, plan=replace(settings.plan, gpus=here.world_size, replicas=replicas))
        yield replace(led, resume=True, resume_step=None) if _resumes(settings, here) else led, rendezvous


def _resumes(settings: TrainSettings, here: RankIdentity) -> bool:
    """Return whether torchrun has restarted the ranks, and the run directory has a checkpoint to resume from."""
    from autopipe.runtime.checkpoint import directory as checkpoints
    from autopipe.runtime.job import RunDirectory

    if not here.attempt or settings.run_dir is None:
        return False
    return bool(checkpoints.steps(RunDirectory(settings.run_dir).checkpoints))


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

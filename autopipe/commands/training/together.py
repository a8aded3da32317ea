"""Training under a cluster's own launcher: the command runs once a rank. Rank 0 does its work, the others follow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

from autopipe.commands.settings import TrainSettings
from autopipe.errors import RunError, counted
from autopipe.launch.remote.identity import RankIdentity, read_identity
from autopipe.launch.remote.rendezvous import Rendezvous

ENVIRONMENT = "env"


def joined(settings: TrainSettings, environment: Mapping[str, str]) -> TrainSettings:
    """Return the settings with which rank of how many this process is, where the environment is to say so.

    Raises: RunError that names the variable that is missing or wrong.
    """
    if settings.launch.name != ENVIRONMENT:
        return settings
    return replace(settings, launch=replace(settings.launch, identity=read_identity(environment)))


def follows(settings: TrainSettings) -> bool:
    """Whether this process is another's to lead: a rank other than 0, that neither prepares nor prints."""
    return settings.launch.identity is not None and settings.launch.identity.rank > 0


def follow(settings: TrainSettings) -> int:
    """Be one of the other ranks, and return the exit code.

    Raises: AutopipeError with what failed first, on whichever rank.
    """
    from autopipe.launch import env

    assert settings.launch.identity is not None, "only a rank follows"
    return env.follow(settings.launch.identity, settings.launch)


@contextlib.contextmanager
def leading(settings: TrainSettings) -> Iterator[tuple[TrainSettings, Rendezvous | None]]:
    """Run as rank 0 and yield the settings and the connections to the other ranks' processes, if there are any.

    If the body raises, the other ranks end with the same error.

    Raises: RunError where the options ask for another number of ranks than there are.
    """
    here = settings.launch.identity
    if here is None:
        yield settings, None
        return
    from autopipe.launch import env

    with env.lead(here, settings.launch) as rendezvous:
        asked = settings.plan.gpus
        if asked is not None and asked != here.world_size:
            raise RunError(
                f"--gpus {asked}, but {here.launcher} has started {counted(here.world_size, 'rank')}",
                remedy=f"leave --gpus away: there are {here.world_size}; or start {counted(asked, 'rank')}",
            )
        # every rank is there already: a plan that leaves some unused, as one with replicas may, is for who asks for it
        replicas = settings.plan.replicas or "never"
        led = replace(settings, plan=replace(settings.plan, gpus=here.world_size, replicas=replicas))
        yield replace(led, resume=True, resume_step=None) if _goes_on(settings, here) else led, rendezvous


def _goes_on(settings: TrainSettings, here: RankIdentity) -> bool:
    """Whether torchrun has started the ranks again, and the run directory has a checkpoint of the time before."""
    from autopipe.runtime.checkpoint import directory as checkpoints
    from autopipe.runtime.job import RunDirectory

    if not here.attempt or settings.run_dir is None:
        return False
    return bool(checkpoints.steps(RunDirectory(settings.run_dir).checkpoints))

"""Training under a cluster's own launcher. The command runs once per rank: rank 0 leads, the others follow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

from autopipe.commands.settings import TrainSettings
from autopipe.launch.remote.identity import RankIdentity, read_identity
from autopipe.launch.remote.rendezvous import Rendezvous

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

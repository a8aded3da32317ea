"""``autopipe run``: a training script whose model runs in stages."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from autopipe.commands.training.submission import in_an_allocation
from autopipe.errors import RunError
from autopipe.launch import slurm
from autopipe.launch.request import LaunchSettings
from autopipe.script.patches import AUTO
from autopipe.script.rank_locations import Places, keep_alive
from autopipe.script.runner import INTERRUPTED, end_by_interrupt, run_script

__all__ = ["INTERRUPTED", "end_by_interrupt", "run", "srun"]

STAGES = 2
"""The number of stages, unless the options or a launcher give it."""
_START = {"--launcher": True}


def run(
    script: Path,
    words: list[str],
    *,
    stages: int | None,
    check: int,
    num_microbatches: str,
    replicas: str,
    timeout: float,
    folder: Path | None,
    quiet: bool,
    launch: LaunchSettings | None = None,
) -> int:
    """Run a script with its arguments, and return its exit code.

    ``stages``: None: as many as the launcher has started or the hosts have slots, else ``STAGES``. ``check``: optimizer
    steps to compare with the script in a process of its own. ``num_microbatches``: parts into which the batch of each
    training call is cut, or "auto". ``replicas``: copies of the model, each in stages on its share of the ranks:
    "auto", "never", or their number. ``timeout``: seconds. Under ``--launcher env``, the processes of other ranks than
    0 do not return.

    Raises: RunError if the script cannot be read, or the ranks cannot be started.
    """
    number = _number_of(replicas)
    parts = _parts_of(num_microbatches)
    places = _places(launch or LaunchSettings(), stages, timeout)
    if number > 1:
        _refuse_replicas(number, places.count, parts)
    return run_script(
        script,
        words,
        places=places,
        timeout=timeout,
        folder=folder,
        steps=check,
        parts=parts,
        replicas=number,
        quiet=quiet,
    )


def _number_of(replicas: str) -> int:
    """Return a number of replicas; 0 for "auto"."""
    words = {"auto": 0, "never": 1}
    if replicas not in words and not (replicas.isdecimal() and int(replicas) > 0):
        raise RunError(f"--replicas is {replicas!r}", remedy="auto, never, or a number, such as 2")
    return words[replicas] if replicas in words else int(replicas)


def _parts_of(text: str) -> int:
    """Return a number of parts; ``AUTO`` for "auto"."""
    if text != "auto" and not (text.isdecimal() and int(text) > 0):
        raise RunError(f"--num-microbatches is {text!r}", remedy="auto, or a number, such as 4; 1 keeps batches whole")
    return AUTO if text == "auto" else int(text)


def _refuse_replicas(replicas: int, ranks: int, parts: int) -> None:
    """Refuse replicas that cannot have equal shares of the ranks, or a part of the batch each."""
    if 1 < parts < replicas:
        raise RunError(
            f"--replicas {replicas} compute parts of each batch, and --num-microbatches is {parts}",
            remedy=f"--num-microbatches {replicas}, or more",
        )
    if ranks % replicas:
        raise RunError(f"--replicas {replicas} cannot have equal shares of {ranks} ranks: use a multiple (--gpus)")


def _places(launch: LaunchSettings, stages: int | None, timeout: float) -> Places:
    if launch.name == "env":
        return _among_ranks(launch, stages, timeout)
    if launch.name != "ssh":
        return Places(stages or STAGES)
    from autopipe.launch.remote.hosts import assign, total_slots

    count = stages or total_slots(launch.hosts) or len(launch.hosts)
    assigned = zip(launch.hosts, assign(launch.hosts, count), strict=True)
    return Places(count, launch, tuple(host.name for host, ranks in assigned for _ in ranks))


def _among_ranks(launch: LaunchSettings, stages: int | None, timeout: float) -> Places:
    """Return the places of the processes that a cluster has started; in that of another rank than 0, serve as it."""
    from autopipe.launch import env
    from autopipe.launch.remote import peer
    from autopipe.launch.remote.rank_environment import read_identity, variables

    identity = read_identity(os.environ)
    env.refuse_other_number(identity, stages)
    if identity.rank:
        from autopipe.script.rank.joining import join

        end = peer.connected(*env.leader(identity, launch))
        end.settimeout(None)
        keep_alive(end)
        join(end, identity.rank, identity.world_size, timeout, launch.interface)
    listener = env.meeting(identity, launch) if identity.world_size > 1 else None
    for name in variables() & os.environ.keys():  # the script is one process, and would take itself for a rank
        del os.environ[name]
    return Places(identity.world_size, launch, meeting=listener)


def srun(typed: Sequence[str], stages: int | None) -> tuple[str, ...]:
    """Return the command that starts the ranks in the SLURM allocation of this process. ``typed``: the words of ours.

    Raises: RunError outside of an allocation.
    """
    if not in_an_allocation(os.environ):
        raise RunError(
            "--launcher slurm starts the ranks of a script in an allocation, and this process is in none",
            remedy="run it in a batch script, or after `salloc --ntasks=N`",
        )
    at = typed.index("run") + 1
    end = typed.index("--") if "--" in typed else len(typed)
    own = slurm.without(typed[at:end], _START)
    command = (sys.executable, "-m", "autopipe.cli", *typed[:at], "--launcher", "env", *own, *typed[end:])
    return (*slurm.srun_words(stages), *command)

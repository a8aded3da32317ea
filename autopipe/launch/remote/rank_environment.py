"""The identity of a rank: the environment variables that a cluster's own launcher sets, as one ``RankIdentity``.

torchrun's variables are the contract; other launchers are read as far as they provide the same information:

==============  ==================  ======================  ==================  =========================
                torchrun            mpirun (Open MPI)       mpiexec (PMI)       srun
==============  ==================  ======================  ==================  =========================
rank            RANK                OMPI_COMM_WORLD_RANK    PMI_RANK            SLURM_PROCID
world size      WORLD_SIZE          OMPI_COMM_WORLD_SIZE    PMI_SIZE            SLURM_NTASKS
on this host    LOCAL_RANK          ..._LOCAL_RANK          MPI_LOCALRANKID     SLURM_LOCALID
hosts share     LOCAL_WORLD_SIZE    ..._LOCAL_SIZE          MPI_LOCALNRANKS     SLURM_STEP_TASKS_PER_NODE
rank 0 is at    MASTER_ADDR         MASTER_ADDR             MASTER_ADDR         SLURM_STEP_NODELIST's first
==============  ==================  ======================  ==================  =========================

The first launcher whose variables are set is used, in this order: torchrun may itself run under srun. ``MASTER_ADDR``
and ``MASTER_PORT`` take precedence over derived values.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from autopipe.errors import RunError

DEFAULT_PORT = 29500
# the ports of srun's jobs, by job and step: below the ephemeral ports of Linux (32768 and up)
_FIRST_PORT, _NUM_PORTS = 15000, 15000
_LARGEST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """The rank of this process, and the address of rank 0."""

    launcher: str  # its name, for messages
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str  # of rank 0, or of torchrun's agent
    port: int
    attempt: int = 0  # how many times torchrun has restarted the ranks
    store_exists: bool = False  # torchrun's agent listens at the address; otherwise rank 0 must

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.local_world_size == self.world_size


@dataclass(frozen=True, slots=True)
class _Names:
    """The variables of one launcher."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    counts: str  # the ranks of this host, or of each node in SLURM's short form, such as 2(x3)


_LAUNCHERS = (
    _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Names("mpirun", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    _Names("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Names("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


_OF_TORCHRUN = (
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
)


def read_identity(environment: Mapping[str, str]) -> RankIdentity:
    """Read the rank of this process from its environment.

    Raises: RunError that names the variable if one is missing, not a number, or contradicts another.
    """
    names = next((names for names in _LAUNCHERS if _is_set(environment, names)), None)
    if names is None:
        raise RunError(
            "--launcher env: no launcher has set the rank of this process",
            where="the environment: neither RANK, OMPI_COMM_WORLD_RANK, PMI_RANK nor SLURM_PROCID is set",
            remedy="start it with torchrun, srun or mpirun (docs/launching.md), or use --launcher local",
        )
    rank = _number(environment, names.rank, names.launcher, 0)
    world_size = _number(environment, names.world_size, names.launcher, 1)
    if rank >= world_size:
        _contradiction(environment, names.rank, names.world_size, "ranks count from 0")
    node = _number(environment, "SLURM_NODEID", "srun", 0) if environment.get("SLURM_NODEID") else 0
    local_world_size = _local_world_size(environment, names, world_size, node)
    if environment.get(names.local_rank):
        local_rank = _number(environment, names.local_rank, names.launcher, 0)
    elif local_world_size == world_size:
        local_rank = rank
    else:
        local_rank = 0
    if local_rank >= local_world_size:
        _contradiction(environment, names.local_rank, names.counts, "ranks of a host count from 0")
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT") if names.launcher == "torchrun" else None
    return RankIdentity(
        launcher=names.launcher,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        address=_address(environment, names.launcher, one_host=local_world_size == world_size),
        port=_port(environment, names.launcher),
        attempt=_number(environment, "TORCHELASTIC_RESTART_COUNT", "torchrun", 0) if attempt else 0,
        store_exists=names.launcher == "torchrun" and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def variables() -> frozenset[str]:
    """Return the names of the variables that make a process a rank, under any launcher."""
    own = {name for names in _LAUNCHERS for name in (names.rank, names.world_size, names.local_rank, names.counts)}
    return frozenset(own | {"MASTER_ADDR", "MASTER_PORT", *_OF_TORCHRUN})


def on_two_hosts(environment: Mapping[str, str]) -> RankIdentity | None:
    """Return the identity of this process if a launcher has started two, one on each of two hosts; else None.

    Raises: RunError as ``read_identity`` does.
    """
    if not any(_is_set(environment, names) for names in _LAUNCHERS):
        return None
    identity = read_identity(environment)
    return identity if (identity.world_size, identity.local_world_size) == (2, 1) else None


def first_host(hosts: str) -> str:
    """Return the first of a SLURM host list: ``rack[2-3,7]node[01-12],login`` -> ``rack2node01``."""
    return re.sub(r"\[(\d*)[^\]]*\]", r"\1", _until_comma(hosts)).strip()


def _until_comma(hosts: str) -> str:
    """Return the text before the first comma outside brackets."""
    depths = itertools.accumulate((character == "[") - (character == "]") for character in hosts)
    ends = (
        at for at, (character, depth) in enumerate(zip(hosts, depths, strict=True)) if (character, depth) == (",", 0)
    )
    return hosts[: next(ends, len(hosts))]


def _is_set(environment: Mapping[str, str], names: _Names) -> bool:
    """Return whether some variables of a launcher are set. A batch script of SLURM has no step, and is not a rank."""
    if names.launcher == "srun":
        return bool(environment.get(names.rank) and environment.get("SLURM_STEP_ID"))
    return bool(environment.get(names.rank) or environment.get(names.world_size))


def _number(environment: Mapping[str, str], name: str, launcher: str, least: int) -> int:
    text = environment.get(name, "").strip()
    if not text:
        raise RunError(
            f"--launcher env: {name} is not set, though other variables of {launcher} are",
            where="the environment",
            remedy=f"start every rank with {launcher}, or set {name} (docs/launching.md)",
        )
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise RunError(
            f"--launcher env: {name}={text!r} is not a whole number of {least} or more", where="the environment"
        )
    return int(text)


def _contradiction(environment: Mapping[str, str], small: str, large: str, why: str) -> None:
    values = ", ".join(
        f"{name}={environment[name]}" if name in environment else f"no {name}" for name in (small, large)
    )
    raise RunError(
        f"--launcher env: {values} contradict each other: {why}",
        where="the environment",
        remedy=f"unset both, or correct {small} or {large}",
    )


def _local_world_size(environment: Mapping[str, str], names: _Names, world_size: int, node: int) -> int:
    """Return the number of ranks of this host; if no variable gives it, the lowest possible number."""
    text = environment.get(names.counts, "").strip()
    if not text:
        local = environment.get(names.local_rank)
        return _number(environment, names.local_rank, names.launcher, 0) + 1 if local else 1
    if names.launcher == "srun":
        counts = list(_expanded(text))
        if node >= len(counts) or min(counts) < 1:
            raise RunError(
                f"--launcher env: {names.counts}={text!r} has no count for node {node} (SLURM_NODEID)",
                where="the environment",
            )
        return counts[node]
    count = _number(environment, names.counts, names.launcher, 1)
    if count > world_size:
        _contradiction(environment, names.counts, names.world_size, "a host cannot have more ranks than there are")
    return count


def _expanded(text: str) -> list[int]:
    """Return SLURM's counts for each node: ``2(x3),1`` -> 2, 2, 2, 1; [0] for an invalid text."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,6})\))?", part.strip(), re.ASCII)
        if match is None:
            return [0]
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _address(environment: Mapping[str, str], launcher: str, *, one_host: bool) -> str:
    if address := environment.get("MASTER_ADDR", "").strip():
        return address
    if launcher == "srun":
        hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
        if host := first_host(hosts):
            return host
    if one_host and launcher != "torchrun":
        return "127.0.0.1"
    raise RunError(
        "--launcher env: MASTER_ADDR is not set, so the address of rank 0 is unknown",
        where="the environment",
        remedy="set MASTER_ADDR to the address or name of rank 0's host, the same for every rank",
    )


def _port(environment: Mapping[str, str], launcher: str) -> int:
    if environment.get("MASTER_PORT", "").strip():
        port = _number(environment, "MASTER_PORT", launcher, 1)
        if port > _LARGEST_PORT:
            raise RunError(
                f"--launcher env: MASTER_PORT={port} is not a port (1 to {_LARGEST_PORT})", where="the environment"
            )
        return port
    if launcher == "torchrun":
        raise RunError(
            "--launcher env: MASTER_PORT is not set, so the port of rank 0 is unknown",
            where="the environment",
            remedy="set MASTER_PORT to a free port of rank 0's host, the same for every rank",
        )
    job = environment.get("SLURM_JOB_ID", "")
    if launcher == "srun" and job.isascii() and job.isdigit():
        step = environment.get("SLURM_STEP_ID", "")
        # steps of one job may run at the same time, and so may jobs
        number = int(job) * 16 + (int(step) if step.isascii() and step.isdigit() else 0)
        return _FIRST_PORT + number % _NUM_PORTS
    return DEFAULT_PORT

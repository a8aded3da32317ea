"""Runs that SLURM starts: it runs the same command again, once per rank, with ``--launcher env``."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopipe.commands.settings import TrainSettings
from autopipe.commands.store import Store
from autopipe.errors import RunError
from autopipe.launch import slurm
from autopipe.launch.request import HostCommand

TRAIN = "train"
SUBMIT_SECONDS = 120.0
# options of the launcher, which the started command replaces with its own; True: the option has a value
_OF_THE_START = {"--launcher": True, "--slurm-option": True, "--dry-run": False}


@dataclass(frozen=True, slots=True)
class Words:
    """A command line, split after ``train``."""

    command: tuple[str, ...]
    rest: tuple[str, ...]

    @staticmethod
    def of(typed: Sequence[str]) -> Words:
        """Split the words after the program's name."""
        at = next(i for i, word in enumerate(typed) if word == TRAIN and tuple(typed[i - 1 : i]) != ("--config",))
        command = (sys.executable, "-m", "autopipe.cli", *typed[: at + 1])
        return Words(command, slurm.without(typed[at + 1 :], _OF_THE_START))

    @property
    def for_a_rank(self) -> tuple[str, ...]:
        """The command of each rank."""
        return (*self.command, "--launcher", "env", *self.rest)


@dataclass(frozen=True, slots=True)
class Submission:
    """A job in the queue: its number, its script, and the file that it will write to."""

    job: str
    script: str
    output: str


def ranks_of(settings: TrainSettings) -> int:
    """Return the number of ranks of the options, else of the stored plan.

    Raises: RunError without either.
    """
    if settings.plan.gpus is not None:
        return settings.plan.gpus
    store = Store(settings.plan.work_dir)
    if not store.plan.exists():
        raise RunError(
            f"--launcher {settings.launch.name} needs the number of ranks: --gpus is not given, and no plan is stored",
            remedy="add --gpus N, or run autopipe plan first",
        )
    return store.stored_plan()[0].num_processes


def _on_gpus(settings: TrainSettings, requested: bool = False) -> bool:
    """Return whether the ranks need GPUs. ``requested``: whether the user's options of sbatch request some.

    Raises: RunError if neither ``--device``, the stored profile nor the options say so. This machine may have other
    devices than the cluster, and a job that requests no GPU would train on CPUs without a message.
    """
    device, store = settings.plan.profile.device or "auto", Store(settings.plan.work_dir)
    if device != "auto":
        return device.startswith("cuda")
    if requested:
        return True
    if store.profile.exists():
        return store.stored_profile().device.kind == "cuda"
    raise RunError(
        f"--launcher {settings.launch.name} needs a device: with --device auto, the job would have no GPU",
        remedy="add --device cuda, or --device cpu",
    )


def in_an_allocation(environment: Mapping[str, str]) -> bool:
    """Return whether this process runs in a SLURM allocation, in which the ranks can start at once."""
    return bool(environment.get("SLURM_JOB_ID"))


def srun(settings: TrainSettings, words: Words) -> tuple[str, ...]:
    """Return the command that starts the ranks in this allocation; without --gpus, one for each of its tasks."""
    return (*slurm.srun_words(settings.plan.gpus), *words.for_a_rank)


def job_of(settings: TrainSettings, words: Words, options: Mapping[str, str]) -> slurm.SlurmJob:
    """Return the run as a job."""
    work_dir, target = settings.plan.work_dir.resolve(), settings.plan.profile.model.target
    stem = Path(target.partition(":")[0]).stem
    return slurm.SlurmJob(
        command=words.command,
        rest=slurm.without(words.rest, {"--run-dir": True}),
        ranks=ranks_of(settings),
        folder=Path.cwd(),
        runs=work_dir / "runs",
        output=work_dir / "slurm",
        name="-".join(filter(None, ("autopipe", re.sub(r"[^A-Za-z0-9_.-]+", "-", stem)))),
        run_dir="" if settings.run_dir is None else str(settings.run_dir.resolve()),
        threads=settings.plan.profile.threads or 1,
        gpus=_on_gpus(settings, slurm.requests_gpus(options)),
        options=options,
    )


def rehearsed(settings: TrainSettings, words: Words, options: Mapping[str, str], inside: bool) -> list[HostCommand]:
    """Return the commands of a run: srun in an allocation, else sbatch with its script."""
    if inside:
        return [HostCommand(ranks=(), command=srun(settings, words), note="in this allocation")]
    job = job_of(settings, words, options)
    return [HostCommand(ranks=tuple(range(job.ranks)), command=("sbatch", "--parsable"), stdin=slurm.script(job))]


def submit(settings: TrainSettings, words: Words, options: Mapping[str, str]) -> Submission:
    """Write the script into the work directory and submit it with sbatch.

    Raises: RunError if sbatch is missing or refuses it.
    """
    job = job_of(settings, words, options)
    text = slurm.script(job)
    job.output.mkdir(parents=True, exist_ok=True)
    path = job.output / f"{time.strftime('%Y%m%d-%H%M%S')}.sh"
    path.write_text(text, encoding="utf-8")
    number = slurm.parse_job_number(_output_of_sbatch(path))
    return Submission(number, str(path), job.output_of(number))


def program(name: str) -> str:
    """Return the path of one of SLURM's programs. Raises: RunError if it is not installed."""
    path = shutil.which(name)
    if path is None:
        raise RunError(
            f"--launcher slurm needs {name}, which is not installed on this machine",
            remedy="run this on a login node of the cluster; --dry-run shows the script without it",
        )
    return path


def _output_of_sbatch(path: Path) -> str:
    try:
        done = subprocess.run(
            [program("sbatch"), "--parsable", str(path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SUBMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RunError(
            f"sbatch did not answer within {SUBMIT_SECONDS:.0f} s",
            where=str(path),
            remedy="check with sinfo whether the cluster's controller responds",
        ) from None
    if done.returncode:
        why = done.stderr.strip().removeprefix("sbatch: error: ") or f"exit code {done.returncode}"
        raise RunError(
            f"sbatch refused the job: {why}",
            where=str(path),
            remedy="add missing options with --slurm-option KEY=VALUE; sinfo shows the partitions",
        )
    return done.stdout

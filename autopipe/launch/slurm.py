"""SLURM: the batch script of a run, and the words that start its ranks. Text only; nothing is run here.

::

    on a login node       script (readable, kept) --sbatch--> job --srun--> `autopipe train --launcher env`, once a rank
    in an allocation                                               srun --> the same

A job that ends with exit code 75 (stopped cleanly, with a checkpoint) puts itself back into the queue and goes on from
there: the minute's notice that SLURM gives before the time limit reaches the ranks through the script's trap.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autopipe.errors import RunError

STOPPED = 75
NOTICE_SECONDS = 60
_KEY = re.compile(r"[a-z][a-z0-9]+(?:-[a-z0-9]+)*", re.ASCII)
_PLAIN = re.compile(r"[\w@%+:,./=-]+", re.ASCII)
# what is said to sbatch already -> how to change it
_DECIDED = {
    "ntasks": "--gpus says how many ranks there are",
    "array": "one job is one run",
    "wrap": "the script is written by autopipe",
    "chdir": "the job runs in the folder that it is submitted from",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """One run as a job. ``command``: the words up to ``train``; ``rest``: what is said to it, without run directory.

    ``folder``: where it runs. ``runs``: where a run directory named by the job's number is made, if ``run_dir`` names
    none. ``output``: the folder of what the job prints. ``options``: sbatch's, by long name, "" for one without value;
    they win over what ``directives`` would say.
    """

    command: tuple[str, ...]
    rest: tuple[str, ...]
    ranks: int
    folder: Path
    runs: Path
    output: Path
    name: str = "autopipe"
    run_dir: str = ""
    threads: int = 1
    gpus: bool = False
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def directives(self) -> dict[str, str]:
        """What sbatch is told: option -> value, "" for one without value.

        Raises: RunError where the ranks do not fit on the nodes asked for.
        """
        nodes = _count(self.options, "nodes") or 1
        each = _count(self.options, "ntasks-per-node") or -(-self.ranks // nodes)
        if each * nodes < self.ranks:
            raise RunError(
                f"{self.ranks} ranks do not fit: nodes={nodes} times ntasks-per-node={each} is {each * nodes}",
                remedy=f"--slurm-option nodes={-(-self.ranks // each)}, or fewer ranks (--gpus)",
            )
        asked_for_gpus = any(name == "gres" or name.startswith("gpus") for name in self.options)
        own = {
            "job-name": self.name,
            "nodes": str(nodes),
            "ntasks": str(self.ranks),
            "ntasks-per-node": str(each),
            **({"cpus-per-task": str(self.threads)} if self.threads > 1 else {}),
            **({"gpus-per-node": str(each)} if self.gpus and not asked_for_gpus else {}),
            "output": f"{self.output}/%j.out".replace("%", "%%").replace("%%j.out", "%j.out"),
            "open-mode": "append",
            "signal": f"B:USR1@{NOTICE_SECONDS}",
            **({} if "no-requeue" in self.options else {"requeue": ""}),
        }
        return {**own, **self.options}

    def output_of(self, number: str) -> str:
        """Return the file that the job of a number writes to, where it is named as by default."""
        return re.sub("%[%j]", lambda found: number if found[0] == "%j" else "%", self.directives["output"])


def parse_option(text: str) -> tuple[str, str]:
    """Take KEY=VALUE, or KEY alone, apart. Raises: ValueError for what would not be one option of sbatch."""
    key, _, value = text.removeprefix("--").partition("=")
    if not _KEY.fullmatch(key):
        raise ValueError(f"{text!r} is not KEY=VALUE with the long name of an option of sbatch, such as partition=gpu")
    if not _can_be_told(value):
        raise ValueError(f"the value of {key} holds a quote, a backslash or a control character: {value!r}")
    if key in _DECIDED:
        raise ValueError(f"{key} is not for --slurm-option: {_DECIDED[key]}")
    return key, value


def _count(options: Mapping[str, str], name: str) -> int:
    """Return a number among the options, 0 where it is not said. Raises: RunError where it is none."""
    text = options.get(name)
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and int(text)):
        raise RunError(f"--slurm-option {name}={text}: a number of 1 or more is meant")
    return int(text)


def _can_be_told(value: str) -> bool:
    """Whether a value survives sbatch's own reading of the script, which knows quotes in a way of its own."""
    return value.isprintable() and not set(value) & set("\"'\\")


def _directive(key: str, value: str) -> str:
    """Return a line for sbatch. Raises: RunError for a value that cannot be written there."""
    if not _can_be_told(value):
        raise RunError(
            f"sbatch cannot be told {key}={value!r}: it holds a quote, a backslash or a control character",
            remedy="rename the folder, or choose another --work-dir",
        )
    quoted = value if _PLAIN.fullmatch(value) else f'"{value}"'
    return f"#SBATCH --{key}={quoted}" if value else f"#SBATCH --{key}"


def srun_words(ranks: int | None = None) -> tuple[str, ...]:
    """Return srun with what a run needs: a failed rank ends all of them. ``ranks`` None: as many as were allocated."""
    return ("srun", "--kill-on-bad-exit=1", *(() if ranks is None else (f"--ntasks={ranks}",)))


def script(job: SlurmJob) -> str:
    """Return the batch script. Every word that came from the user is quoted for the shell.

    Raises: RunError where the ranks do not fit on the nodes, or a name cannot be told to sbatch.
    """
    directives = "\n".join(_directive(key, value) for key, value in job.directives.items())
    run = shlex.quote(job.run_dir) if job.run_dir else f'{shlex.quote(f"{job.runs}/slurm-")}"$SLURM_JOB_ID"'
    return f"""#!/bin/bash
{directives}

# Written by autopipe, for sbatch; every task is one rank.
cd -- {shlex.quote(str(job.folder))} || exit 1
run={run}

# put back into the queue: go on from the newest checkpoint
resume=()
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && [ -e "$run/checkpoints/latest" ]; then
    resume=(--resume)
fi

# USR1 comes before the time limit, TERM when the job is cancelled: the ranks finish a step, save, and end
noticed="" cancelled=""
trap 'noticed=1; kill -USR1 "$step"' USR1
trap 'noticed=1; cancelled=1; kill -TERM "$step"' TERM

export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-1}}"
{shlex.join(srun_words(job.ranks))} \\
    {shlex.join(job.command)} --launcher env \\
    --run-dir "$run" "${{resume[@]}}" \\
    {shlex.join(job.rest)} &
step=$!
while wait "$step"; code=$?; [ -n "$noticed" ]; do
    noticed=""
done

if [ "$code" -eq {STOPPED} ] && [ -z "$cancelled" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def parse_job_number(said: str) -> str:
    """Return the job's number of what ``sbatch --parsable`` said: the number, or number;cluster.

    Raises: RunError where it said something else.
    """
    number = said.strip().splitlines()[-1].partition(";")[0] if said.strip() else ""
    if not number.isdigit():
        raise RunError(f"sbatch did not say a job number, but {said.strip()[:200]!r}", remedy="squeue shows your jobs")
    return number


def without(words: Iterable[str], dropped: Mapping[str, bool]) -> tuple[str, ...]:
    """Return a command's words without some options. ``dropped``: option -> whether a value follows it."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name not in dropped:
            kept.append(word)
        elif dropped[name] and not equals:
            next(rest, None)
    return tuple(kept)

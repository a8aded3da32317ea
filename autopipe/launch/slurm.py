"""SLURM: the batch script of a run, and the command that starts its ranks. This module only builds text.

::

    on a login node       script (readable, kept) --sbatch--> job --srun--> `autopipe train --launcher env`, once a rank
    in an allocation                                               srun --> the same

A job that ends with exit code 75 (stopped gracefully, with a checkpoint) requeues itself and resumes from there. The
signal that SLURM sends a minute before the time limit reaches the ranks through the script's trap.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autopipe.errors import RunError
from autopipe.launch.request import cpus_of_rank

STOPPED = 75
NOTICE_SECONDS = 60
_KEY = re.compile(r"[a-z][a-z0-9]+(?:-[a-z0-9]+)*", re.ASCII)
_PLAIN = re.compile(r"[\w@%+:,./=-]+", re.ASCII)
# options of sbatch that autopipe sets -> how to change them
_DECIDED = {
    "ntasks": "set the number of ranks with --gpus",
    "array": "one job is one run",
    "wrap": "autopipe writes the script",
    "chdir": "the job runs in the folder that it is submitted from",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """One run as a job."""

    command: tuple[str, ...]  # the command line up to ``train``
    rest: tuple[str, ...]  # the words after it, without the run directory
    ranks: int
    folder: Path  # the working directory
    runs: Path  # the parent of a run directory named by the job's number, unless ``run_dir`` is given
    output: Path  # the folder of the job's output
    name: str = "autopipe"
    run_dir: str = ""
    threads: int = 1  # a rank
    gpus: bool = False
    options: Mapping[str, str] = field(default_factory=dict)  # of sbatch, by long name, "" without a value

    @property
    def directives(self) -> dict[str, str]:
        """The options for sbatch: name -> value, "" without a value. Those of the user take precedence.

        Raises: RunError if the ranks do not fit on the requested nodes.
        """
        nodes = _count(self.options, "nodes") or 1
        each = _count(self.options, "ntasks-per-node") or -(-self.ranks // nodes)
        if each * nodes < self.ranks:
            raise RunError(
                f"{self.ranks} ranks do not fit: nodes={nodes} times ntasks-per-node={each} is {each * nodes}",
                remedy=f"--slurm-option nodes={-(-self.ranks // each)}, or fewer ranks (--gpus)",
            )
        cpus = cpus_of_rank(self.threads, gpus=self.gpus)
        own = {
            "job-name": self.name,
            "nodes": str(nodes),
            "ntasks": str(self.ranks),
            "ntasks-per-node": str(each),
            **({"cpus-per-task": str(cpus)} if cpus > 1 else {}),
            **({"gpus-per-node": str(each)} if self.gpus and not requests_gpus(self.options) else {}),
            "output": f"{self.output}/%j.out".replace("%", "%%").replace("%%j.out", "%j.out"),
            "open-mode": "append",
            "signal": f"B:USR1@{NOTICE_SECONDS}",
            **({} if "no-requeue" in self.options else {"requeue": ""}),
        }
        return {**own, **self.options}

    def output_of(self, number: str) -> str:
        """Return the output file of a job number, if the option ``output`` has its default."""
        return re.sub("%[%j]", lambda match: number if match[0] == "%j" else "%", self.directives["output"])


def parse_option(text: str) -> tuple[str, str]:
    """Split KEY=VALUE, or KEY alone. Raises: ValueError if it is not an option of sbatch that the user may set."""
    key, _, value = text.removeprefix("--").partition("=")
    if not _KEY.fullmatch(key):
        raise ValueError(f"{text!r} is not KEY=VALUE with the long name of an option of sbatch, such as partition=gpu")
    if not _is_representable(value):
        raise ValueError(f"the value of {key} contains a quote, a backslash or a control character: {value!r}")
    if key in _DECIDED:
        raise ValueError(f"--slurm-option cannot set {key}: {_DECIDED[key]}")
    return key, value


def requests_gpus(options: Mapping[str, str]) -> bool:
    """Return whether options of sbatch request GPUs."""
    return any(name == "gres" or name.startswith("gpus") for name in options)


def _count(options: Mapping[str, str], name: str) -> int:
    """Return the number that an option gives, 0 without the option. Raises: RunError if it is not a number."""
    text = options.get(name)
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and int(text)):
        raise RunError(f"--slurm-option {name}={text}: expected a number of 1 or more")
    return int(text)


def _is_representable(value: str) -> bool:
    """Return whether sbatch reads a value from the script unchanged: it has its own rules for quotes."""
    return value.isprintable() and not set(value) & set("\"'\\")


def _directive(key: str, value: str) -> str:
    """Return the line of one option. Raises: RunError for a value that sbatch would read differently."""
    if not _is_representable(value):
        raise RunError(
            f"sbatch cannot read {key}={value!r}: it contains a quote, a backslash or a control character",
            remedy="rename the folder, or choose another --work-dir",
        )
    quoted = value if _PLAIN.fullmatch(value) else f'"{value}"'
    return f"#SBATCH --{key}={quoted}" if value else f"#SBATCH --{key}"


def srun_words(ranks: int | None = None) -> tuple[str, ...]:
    """Return the srun command, with which a failed rank ends all. ``ranks`` None: as many as were allocated."""
    return ("srun", "--kill-on-bad-exit=1", *(() if ranks is None else (f"--ntasks={ranks}",)))


def script(job: SlurmJob) -> str:
    """Return the batch script. Every word from the user is quoted for the shell.

    Raises: RunError if the ranks do not fit on the nodes, or sbatch cannot read a name.
    """
    directives = "\n".join(_directive(key, value) for key, value in job.directives.items())
    run = shlex.quote(job.run_dir) if job.run_dir else f'{shlex.quote(f"{job.runs}/slurm-")}"$SLURM_JOB_ID"'
    return f"""#!/bin/bash
{directives}

# Written by autopipe, for sbatch; every task is one rank.
cd -- {shlex.quote(str(job.folder))} || exit 1
run={run}

# after a requeue, resume from the newest checkpoint
resume=()
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && [ -e "$run/checkpoints/latest" ]; then
    resume=(--resume)
fi

# USR1 precedes the time limit, TERM a cancellation: the ranks finish a step, save, and end
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


def parse_job_number(output: str) -> str:
    """Return the job's number from the output of ``sbatch --parsable``: the number, or number;cluster.

    Raises: RunError for any other output.
    """
    number = output.strip().splitlines()[-1].partition(";")[0] if output.strip() else ""
    if not number.isdigit():
        raise RunError(
            f"sbatch printed {output.strip()[:200]!r} in place of a job number", remedy="squeue shows your jobs"
        )
    return number


def without(words: Iterable[str], dropped: Mapping[str, bool]) -> tuple[str, ...]:
    """Return a command's words without some options. ``dropped``: option -> whether it takes a value."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name not in dropped:
            kept.append(word)
        elif dropped[name] and not equals:
            next(rest, None)
    return tuple(kept)

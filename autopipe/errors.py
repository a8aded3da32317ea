"""The error tree.

::

    AutopipeError(what, *, where="", remedy="")   abstract; exit code 1; prints  Error: what / at: where / try: remedy
    ├── ModelFileError    the model file cannot be imported, lacks a definition, or fails
    ├── TraceError        the model cannot be captured; where = file:line of the user's code
    ├── ProfileError      the model cannot be measured
    ├── PlanError         no plan fits, or the requested plan is invalid; carries the numbers
    │   └── DoesNotFitError   no plan fits the memory of the devices
    ├── ScheduleError     a named rule of schedules is broken; carries the grid with the cell marked
    ├── ArtifactError     a file that a step wrote is damaged, or belongs to another model
    │   └── VersionError  the file is intact, but has another format version
    ├── RunError          a run cannot start or continue (directory, data, checkpoint)
    │   └── AuditError    a step of the run differs from plain training; carries the step
    ├── WorkerError       exit code 3; a rank failed: rank, stage, instruction and its traceback
    └── InternalError     a bug in autopipe: an internal invariant does not hold

``AutopipeError`` is for ``except`` clauses: code raises one of its subclasses. An error without a message raises
ValueError.
"""

from __future__ import annotations

import difflib
import errno
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path


class AutopipeError(Exception):
    """The abstract base of all errors: what happened, where, and what to try.

    Raises: TypeError if this class itself is instantiated; ValueError without a message.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        if type(self) is AutopipeError:
            raise TypeError("AutopipeError is abstract; raise one of its subclasses")
        if not what.strip():
            raise ValueError("an error must say what happened")
        super().__init__(what)
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  at:  {self.where}")
        if self.remedy:
            lines.append(f"  try: {self.remedy}")
        return "\n".join(lines)


class ModelFileError(AutopipeError):
    """The model file cannot be imported, lacks a definition, or fails."""


class TraceError(AutopipeError):
    """The model cannot be captured; ``where`` is the user's ``file:line``."""

    within: tuple[str, ...] = ()  # paths of the modules whose forward was running, outermost first; () if unknown


class ProfileError(AutopipeError):
    """The model cannot be measured on this device."""


class PlanError(AutopipeError):
    """No plan fits, or the requested plan is invalid."""


class DoesNotFitError(PlanError):
    """No plan fits the memory of the devices."""


class ScheduleError(AutopipeError):
    """A schedule violates a rule. ``rule`` is its name, ``grid`` the schedule with the cell marked."""

    def __init__(self, what: str, *, rule: str = "", grid: str = "", where: str = "", remedy: str = "") -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.rule = rule
        self.grid = grid

    def __str__(self) -> str:
        text = super().__str__()
        if self.rule:
            text = f"[{self.rule}] {text}"
        return f"{text}\n\n{self.grid}" if self.grid else text


class ArtifactError(AutopipeError):
    """A file that an earlier step wrote is damaged, or belongs to another model."""


class VersionError(ArtifactError):
    """An intact file that another version of autopipe wrote. It is rebuilt if possible."""


class RunError(AutopipeError):
    """A run cannot start or continue because of its directory, its data or its checkpoint."""


class AuditError(RunError):
    """A step of a run differs from plain training in the same state. ``step``: number of the minibatch, from 0."""

    def __init__(self, what: str, *, step: int = 0, where: str = "", remedy: str = "") -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.step = step


class WorkerError(AutopipeError):
    """A rank failed. The message is that of the first failure, without the failures that it caused on other ranks.

    ``modules``: the names of the stage's modules. ``out_of_memory``: if memory ran out, the bytes that were
    ``predicted``, ``used``, ``requested`` and ``available``.
    """

    exit_code = 3

    def __init__(
        self,
        what: str,
        *,
        rank: int,
        host: str = "",
        stage: int | None = None,
        modules: str = "",
        instruction: str = "",
        remote_traceback: str = "",
        where: str = "",
        remedy: str = "",
        out_of_memory: Mapping[str, int] | None = None,
    ) -> None:
        place = f"rank {rank}"
        if host:
            place += f" on {host}"
        if stage is not None:
            place += f", stage {stage}{f' ({modules})' if modules else ''}"
        if instruction:
            place += f", instruction {instruction}"
        super().__init__(what, where=f"{place}{'; ' + where if where else ''}", remedy=remedy)
        self.rank = rank
        self.host = host
        self.stage = stage
        self.instruction = instruction
        self.remote_traceback = remote_traceback
        self.out_of_memory = dict(out_of_memory or {})


class InternalError(AutopipeError):
    """A bug in autopipe: an internal invariant does not hold. The user can only report it."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        remedy = remedy or "this is a bug in autopipe; please report it with the command and its output with --debug"
        super().__init__(what, where=where, remedy=remedy)


def disk_is_full(error: BaseException, folder: Path) -> bool:
    """Return whether an error means a full disk or quota: by its errno, else by the free space of ``folder``."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if "No space left on device" in str(error):
        return True
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return False
    return usage.total > 0 and usage.free == 0


def unknown_choice(kind: str, given: str, known: Iterable[str]) -> str:
    """Return the message for an unknown choice, with the known choices and the most similar one."""
    names = sorted(known)
    nearest = difflib.get_close_matches(given, names, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown {kind} {given!r}; known: {', '.join(names)}.{hint}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 stage``, ``2 stages``, ``0 minibatches``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('s', 'x', 'ch', 'sh')) else 's'}"


def with_article(name: str) -> str:
    """Return the name of a type with its article: ``an int``, ``a Tensor``, ``an LBFGS``."""
    spelled_out = name[:2].isupper() and name[0] in "FHLMNRSX"  # pronounced letter by letter
    return f"{'an' if spelled_out or name[:1].lower() in tuple('aeio') else 'a'} {name}"

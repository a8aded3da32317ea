"""The code that an artifact may cause to run: code that only the user can write, as only the user can the artifact.

An artifact (profile.json, a run's plan.json) names a TARGET, its arguments and hooks as text, and a run has stage
files. An account that can write an artifact, or the code that it names, can run any program as the user. So neither may
be writable by another account. Code that the command itself names is not examined.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import shlex
import stat
import sys
import types
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from autopipe.errors import RunError
from autopipe.ir.artifact import write_text
from autopipe.ir.profile import WorkloadSpec
from autopipe.users_code import PYTHON, is_own_file, library_of
from autopipe.workload.target.files import files_of
from autopipe.workload.target.targets import Target, elsewhere

MODEL = "model"
_OPTIONS = {"evaluate_data": "--eval-data", "after_step": "--after-step"}
_STAGES_DIGEST = "content.sha256"  # of the stage files, in their folder


@dataclass(frozen=True, slots=True)
class Reference:
    """One reference of a workload to code."""

    role: str  # MODEL, the name of a hook, or ``argument NAME``
    text: str  # as the user named it
    target: Target

    def option(self, flag: str) -> str:
        """Return the command-line option that gives this reference. ``flag``: the option before TARGET, or ""."""
        if self.role == MODEL:
            return f"{flag} {shlex.quote(self.text)}".strip()
        kind = "--arg" if self.role.startswith("argument ") else _OPTIONS.get(self.role, f"--{self.role}")
        return f"{flag} TARGET {kind} {shlex.quote(self.text)}".strip()


def references(spec: WorkloadSpec) -> tuple[Reference, ...]:
    """Return every reference of a workload that determines the code to run and its arguments."""
    target = Target.parse(spec.target)
    arguments = [
        Reference(f"argument {name}", f"{name}={value}", target) for name, value in sorted(spec.arguments.items())
    ]
    hooks = [Reference(name, text, elsewhere(text) or target) for name, text in sorted(spec.hooks.items())]
    return (Reference(MODEL, spec.target, target), *arguments, *hooks)


def refuse_untrusted(
    spec: WorkloadSpec, artifact: Path, command: str, *, flag: str = "", named: Collection[str] = ()
) -> None:
    """Refuse a workload that an artifact names, if another account can write the artifact or the code.

    ``named``: the roles that the current command names. ``command``, ``flag``: the form of TARGET on its command line.

    Raises: RunError with the file, its owner or mode, and the option that names the code.
    """
    for reference in references(spec):
        if reference.role in named:
            continue
        reason = writable_by_others(artifact) or _untrusted_code(reference.target)
        if reason:
            raise RunError(
                f"{artifact.name} names {reference.text} ({reference.role}), and {reason}: its name in an artifact is "
                "not enough to run code",
                where=str(artifact),
                remedy=f"if you trust that code, name it: {command} {reference.option(flag)}",
            )


def _untrusted_code(target: Target) -> str:
    """Return why the code of a TARGET is not the user's, or ""."""
    files = files_of(target)
    if target.location.partition(".")[0] in sys.stdlib_module_names or any(map(_is_of_python, files)):
        return f"{target.location} is a module of Python"
    if not files:
        return f"{target.location} has no file on this machine"
    named = (Path(target.location).expanduser().absolute(),) if target.is_file else ()  # perhaps a link
    return next(filter(None, map(writable_by_others, (*named, *files))), "")


def _is_of_python(path: Path) -> bool:
    """Return whether a file is of the standard library, whose functions run any program with the right arguments."""
    return library_of(str(path.resolve())) == PYTHON


def writable_by_others(path: Path) -> str:
    """Return which other account can write a file or replace it in its folder, as a clause, or "" if none can.

    A file of root counts as the user's, and so does one that the user's private group can write, as with umask 002.
    """
    for place in dict.fromkeys((path.resolve(), path.resolve().parent, path.absolute().parent)):
        try:
            status = place.stat()
        except OSError as error:
            return f"{place} cannot be read ({error.strerror})"
        if status.st_uid not in (os.geteuid(), 0):
            return f"{place} belongs to another account ({_name_of(status.st_uid)})"
        if place != path.resolve() and status.st_mode & stat.S_ISVTX:
            continue  # such as /tmp, where an account can replace its own files only
        if status.st_mode & stat.S_IWOTH:
            return f"every account can write {place} (mode {stat.S_IMODE(status.st_mode):03o})"
        if status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid, status.st_uid):
            return f"its group can write {place} (mode {stat.S_IMODE(status.st_mode):03o})"
    return ""


def _is_private_group(group: int, owner: int) -> bool:
    """Return whether a group is the primary one of an account, has its name, and has no other member."""
    try:
        account, entry = pwd.getpwuid(owner), grp.getgrgid(group)
    except KeyError:  # an account or a group without a name, as in a container
        return False
    same = (account.pw_gid, account.pw_name) == (group, entry.gr_name)
    return same and set(entry.gr_mem) <= {account.pw_name}


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"number {uid}"


def changed_since(spec: WorkloadSpec, artifact: Path) -> tuple[str, ...]:
    """Return the files and modules of a workload that were written after an artifact, if they are on this machine."""
    try:
        written = artifact.stat().st_mtime_ns
        return tuple(
            dict.fromkeys(
                reference.target.location
                for reference in references(spec)
                if any(path.stat().st_mtime_ns > written for path in files_of(reference.target))
            )
        )
    except (OSError, ImportError, ValueError):  # of the finder of a module, too
        return ()


def arguments_of(spec: WorkloadSpec) -> str:
    """Return the arguments of a command that name a workload: TARGET, and its arguments and hooks as options."""
    return " ".join(reference.option("").removeprefix("TARGET ") for reference in references(spec))


def record_stages(folder: Path) -> None:
    """Record the content of the stage files of a folder, in the folder."""
    write_text(folder / _STAGES_DIGEST, _digest_of_stages(folder) + "\n")


def untrusted_stages(folder: Path) -> str:
    """Return why the stage files of a folder must not run: another account can write them, or they have changed.

    Returns "" for files that may run.
    """
    try:
        reasons = (writable_by_others(path) for path in _stage_files(folder))
        if reason := next(filter(None, reasons), ""):
            return reason
        recorded = (folder / _STAGES_DIGEST).read_text(encoding="ascii").strip()
        return "" if recorded == _digest_of_stages(folder) else "they have changed since autopipe wrote them"
    except (OSError, ValueError) as error:
        return f"they cannot be read ({error})"


def _stage_files(folder: Path) -> list[Path]:
    """Return the stage files of a folder, including those of evaluation."""
    folders = (folder, folder / "evaluation")
    return sorted(path for place in folders for kind in ("stage_*.py", "divisor.py") for path in place.glob(kind))


def _digest_of_stages(folder: Path) -> str:
    contents = [
        [str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest()] for path in _stage_files(folder)
    ]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def users_files(spec: WorkloadSpec) -> dict[Path, str]:
    """Return the digests of the user's source files: those that a workload names, and all other imported files.

    Installed packages are left out.
    """
    files = {path for reference in references(spec) for path in files_of(reference.target)}
    modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    imported = (Path(file) for module in modules if isinstance(file := vars(module).get("__file__"), str))
    files |= {path.resolve() for path in imported if path.suffix == ".py" and is_own_file(str(path))}
    return {path: digest_of_file(path) for path in files}


def digest_of_file(path: Path) -> str:
    """Return the digest of a file, or "" if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""

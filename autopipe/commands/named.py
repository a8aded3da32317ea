"""The code that the user has named: the only code that an artifact may cause to run.

An artifact (profile.json, a run's plan.json) names a TARGET, its arguments and hooks as text, and a run has stage
files. The author of an artifact can name any callable with any argument, with a matching digest. So the names that the
user gave are recorded outside of all artifacts, in the user's own folder::

    $XDG_STATE_HOME/autopipe/named/     (~/.local/state without the variable)
      REFERENCE/CONTENT                 SHA-256 of the reference; SHA-256 of its files. Empty files

A reference without a record is refused, with the option that names it. The folder may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import stat
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from autopipe.errors import RunError
from autopipe.ir.profile import WorkloadSpec
from autopipe.workload.target.files import files_of
from autopipe.workload.target.targets import Target, elsewhere

MODEL = "model"
_OPTIONS = {"evaluate_data": "--eval-data", "after_step": "--after-step"}


@dataclass(frozen=True, slots=True)
class Reference:
    """One reference of a workload to code."""

    role: str  # MODEL, the name of a hook, or ``argument NAME``
    text: str  # as the user named it
    location: str  # the absolute path of a file, or the dotted name of a module
    detail: str  # the attribute, or the value of an argument

    @property
    def key(self) -> str:
        """The name of the reference in the user's folder."""
        return _digest([self.role, self.location, self.detail])

    def option(self, flag: str) -> str:
        """Return the command-line option that gives this reference. ``flag``: the option before TARGET, or ""."""
        if self.role == MODEL:
            return f"{flag} {shlex.quote(self.text)}".strip()
        kind = "--arg" if self.role.startswith("argument ") else _OPTIONS.get(self.role, f"--{self.role}")
        return f"{flag} TARGET {kind} {shlex.quote(self.text)}".strip()

    def content(self) -> str:
        """Return the digest of its files. Raises: OSError if one cannot be read."""
        files = () if self.role.startswith("argument ") else files_of(Target(self.location, ""))
        return _digest([[str(path), _sha256(path)] for path in files])


def references(spec: WorkloadSpec) -> tuple[Reference, ...]:
    """Return every reference of a workload that determines the code to run and its arguments."""
    target = Target.parse(spec.target)
    location = str(files_of(target)[-1]) if target.is_file else target.location
    references_of_spec = [Reference(MODEL, spec.target, location, target.attribute)]
    for name, value in sorted(spec.arguments.items()):
        references_of_spec.append(
            Reference(f"argument {name}", f"{name}={value}", location, json.dumps([target.attribute, value]))
        )
    for name, text in sorted(spec.hooks.items()):
        hook = elsewhere(text)
        if hook is None:
            references_of_spec.append(Reference(name, text, location, text[1:]))
            continue
        place = str(files_of(hook)[-1]) if hook.is_file else hook.location
        references_of_spec.append(Reference(name, text, place, hook.attribute))
    return tuple(references_of_spec)


def remember(spec: WorkloadSpec, roles: Collection[str] | None = None) -> None:
    """Record that the user has named a workload; ``roles``: only these parts of it.

    If the user's folder cannot be written, the next command requires TARGET again.
    """
    for reference in references(spec):
        if roles is None or reference.role in roles:
            try:
                _note(reference.key, reference.content())
            except OSError:
                return


def refuse_unnamed(
    spec: WorkloadSpec, artifact: Path, command: str, *, flag: str = "", named: Collection[str] = ()
) -> None:
    """Refuse a workload that an artifact names, unless the user has named each part of it with the same content.

    ``named``: the roles that the current command names. ``command``, ``flag``: the form of TARGET on its command line.

    Raises: RunError naming the part and the difference.
    """
    for reference in references(spec):
        if reference.role not in named:
            _refuse(reference, artifact, f"{command} {reference.option(flag)}")


def _refuse(reference: Reference, artifact: Path, remedy: str) -> None:
    what = f"{artifact.name} names {reference.text} ({reference.role})"
    versions = {path.name for folder in _folders() for path in _entries(folder / reference.key)}
    if not versions:
        raise RunError(
            f"{what}, which you have never named on this machine: a name in an artifact is not enough to run code",
            where=str(artifact),
            remedy=f"if you trust that code, name it: {remedy}",
        )
    try:
        content = reference.content()
    except OSError as error:
        raise RunError(
            f"{what}, and its file cannot be read: {error.strerror}",
            where=reference.location,
            remedy=f"name its present location: {remedy}",
        ) from None
    if content not in versions:
        raise RunError(
            f"{what}, and its file has changed since you named it",
            where=reference.location,
            remedy=f"name it again: {remedy}",
        )


def changed_since_named(spec: WorkloadSpec) -> tuple[str, ...]:
    """Return the files and modules of a workload that have changed since the user last named them on this machine.

    Nothing is imported. One that was never named here, or that is not on this machine, is left out.
    """
    return tuple(dict.fromkeys(reference.location for reference in references(spec) if _has_changed(reference)))


def arguments_of(spec: WorkloadSpec) -> str:
    """Return the arguments of a command that name a workload: TARGET, and its arguments and hooks as options."""
    return " ".join(reference.option("").removeprefix("TARGET ") for reference in references(spec))


def _has_changed(reference: Reference) -> bool:
    times: dict[str, int] = {}
    try:
        for folder in _folders():
            for path in _entries(folder / reference.key):
                times[path.name] = max(path.stat().st_mtime_ns, times.get(path.name, 0))
        return bool(times) and reference.content() != max(times, key=lambda content: times[content])
    except (OSError, ImportError, ValueError):  # of the finder of a module, too
        return False


def remember_stages(folder: Path) -> None:
    """Record that this account wrote the stage files of a folder."""
    try:
        _note("stages", _digest_of_stages(folder))
    except OSError:
        return


def wrote_stages(folder: Path) -> bool:
    """Return whether this account wrote the stage files of a folder, and none has changed since."""
    try:
        content = _digest_of_stages(folder)
    except OSError:
        return False
    return any(path.name == content for place in _folders() for path in _entries(place / "stages"))


def _digest_of_stages(folder: Path) -> str:
    """Return the digest of the stage files of a folder, including those of evaluation."""
    folders = (folder, folder / "evaluation")
    files = sorted(path for place in folders for kind in ("stage_*.py", "divisor.py") for path in place.glob(kind))
    return _digest([[str(path.relative_to(folder)), _sha256(path)] for path in files])


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode("utf-8", "surrogateescape")).hexdigest()


def _entries(folder: Path) -> Iterable[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _note(key: str, content: str) -> None:
    for find in (_home, _temporary):
        place = find()
        if place is None:
            continue
        try:
            folder = place / key
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / content).touch(mode=0o600)
            return
        except OSError:
            continue
    raise OSError("neither the user's home nor the folder for temporary files can be written")


def _folders() -> tuple[Path, ...]:
    return tuple(folder for folder in (_home(), _temporary(make=False)) if folder is not None)


def _home() -> Path | None:
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        return (state if state.is_absolute() else Path.home() / ".local" / "state") / "autopipe" / "named"
    except RuntimeError:  # an account without a home
        return None


def _temporary(*, make: bool = True) -> Path | None:
    """Return a private folder for temporary files, for an account whose home cannot be written."""
    folder = Path(tempfile.gettempdir()) / f"autopipe-{os.getuid()}"
    try:
        if make:
            folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return folder / "named" if private else None

"""The directories of checkpoints: one a step, with a file of tensors for each writer of a stage, and a manifest.

A checkpoint is written to ``step-N.PLAN.tmp``, flushed to the disk, renamed, and only then named in ``latest``: a crash
leaves the old checkpoint or the new one, never a mixture. An older checkpoint of the same step is ``step-N.replaced``
until the new one has its place. Nothing in it can run code.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autopipe.errors import ArtifactError, RunError, disk_is_full
from autopipe.ir import artifact
from autopipe.ir.artifact import write_text
from autopipe.runtime.checkpoint.manifest import Manifest, StageFile, StageState, TensorSlice
from autopipe.runtime.checkpoint.names import directory_of as directory_of  # noqa: PLC0414  # users of this module
from autopipe.runtime.checkpoint.names import steps as steps  # noqa: PLC0414
from autopipe.runtime.checkpoint.on_disk import refuse_other_file
from autopipe.runtime.checkpoint.sharing import Sums, refuse_unequal_replicas
from autopipe.runtime.checkpoint.snapshot import Snapshot

_REPLACED = ".replaced"
_INCOMPLETE = re.compile(r"step-\d{8,}(\.\w+)?\.(tmp|old)|\.latest\.\d+\.tmp")


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """What one writer of a stage writes into a checkpoint."""

    stage: int
    # the tensors that it writes, copied
    snapshot: Snapshot
    # as in ``StageFile``
    training: StageState = field(default_factory=StageState)
    ties: dict[str, int] = field(default_factory=dict)
    slices: dict[str, TensorSlice] = field(default_factory=dict)
    # which of the writers of the stage
    writer: int = 0
    # of the tensors that all writers of the stage must hold bit for bit
    checksums: dict[str, int] = field(default_factory=dict)
    # of the live tensors that the snapshot was made of
    live: Sums | None = None


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """The description of a part that is in an unfinished checkpoint."""

    file: StageFile
    checksums: dict[str, int]


def unfinished(checkpoints: Path, step: int, plan_digest: str) -> Path:
    """Return the directory in which a step's checkpoint is written.

    Each plan has its own. A host that lost its connection may still write its part of an attempt that the other hosts
    have given up and continued under another plan. Under the same plan it would write the same bytes.
    """
    return checkpoints / f"step-{step:08d}.{plan_digest}.tmp"


def file_name(stage: int, writer: int, writers: Sequence[int]) -> str:
    """Return the name of the file of one writer of a stage. ``writers``: the number of writers of each stage."""
    part = f".part-{writer}-of-{writers[stage]}" if writers[stage] > 1 else ""
    return f"stage-{stage}-of-{len(writers)}{part}.safetensors"


def descriptions(temporary: Path, writers: Sequence[int]) -> dict[tuple[int, int], Path]:
    """Return, for each stage and writer, the file that is present once its part of an unfinished checkpoint is."""
    return {
        (stage, writer): (temporary / file_name(stage, writer, writers)).with_suffix(".json")
        for stage, count in enumerate(writers)
        for writer in range(count)
    }


def write_part(temporary: Path, part: Part, writers: Sequence[int]) -> None:
    """Write the file of one writer of a stage, and then its description, into an unfinished checkpoint.

    Raises: ArtifactError if the disk refuses it; RunError if the file does not hold what was trained.
    """
    name = file_name(part.stage, part.writer, writers)
    path = temporary / name
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        sha256, size = part.snapshot.write(path)
        if part.live is not None:
            refuse_other_file(path, part.live)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()  # on a full disk, a part of it would take the room for anything else
        raise ArtifactError(
            f"the checkpoint of stage {part.stage} cannot be written: {error.strerror or error}",
            where=str(path),
            remedy="free space on that disk; --keep-checkpoints limits the number of checkpoints"
            if disk_is_full(error, path.parent)
            else "make its folder writable, or give another --run-dir",
        ) from error
    file = StageFile(name, sha256, size, part.snapshot.names, part.training, part.ties, part.slices)
    artifact.save(WrittenPart(file, part.checksums), descriptions(temporary, writers)[part.stage, part.writer])


def finish(checkpoints: Path, temporary: Path, writers: Sequence[int], manifest: Manifest, keep: int) -> Path:
    """Collect the parts of all stages in the manifest, make the checkpoint the latest one, and return its directory.

    ``writers`` is the number of writers of each stage, ``keep`` how many of the newest checkpoints are kept; 0 keeps
    all.

    Raises: ArtifactError if it cannot be written; RunError if the copies of a tied parameter or the replicas of a stage
    differ.
    """
    described = descriptions(temporary, writers)
    parts = {
        place: artifact.load(WrittenPart, path, renew="save the checkpoint again") for place, path in described.items()
    }
    for stage, count in enumerate(writers):
        if count > 1:
            own = [parts[stage, writer] for writer in range(count)]
            written = [name for part in own for name in part.file.tensors if name not in part.file.slices]
            refuse_unequal_replicas(stage, [part.checksums for part in own], written)
    files = tuple(part.file for part in parts.values())
    _refuse_unequal_ties(files)
    final = directory_of(checkpoints, manifest.step)
    artifact.save(replace(manifest, files=files), temporary / "manifest.json")
    try:
        for path in described.values():
            path.unlink()
        _sync_directory(temporary)
        replaced = _rename(final, _REPLACED) if final.exists() else None
        temporary.rename(final)
        _sync_directory(checkpoints)
        if replaced is not None:
            shutil.rmtree(replaced)
        write_text(checkpoints / "latest", final.name + "\n")
        for old in steps(checkpoints)[:-keep] if keep else []:
            _remove(directory_of(checkpoints, old))
    except OSError as error:
        raise ArtifactError(f"the checkpoint cannot be finished: {error.strerror}", where=str(final)) from error
    return final


def _refuse_unequal_ties(files: Sequence[StageFile]) -> None:
    first_file: dict[str, tuple[int, str]] = {}
    for stage in files:
        for name, bits in stage.ties.items():
            expected, where = first_file.setdefault(name, (bits, stage.file))
            if expected != bits:
                raise RunError(
                    f"{name} is tied, and its copies are no longer equal: {where} and {stage.file} differ",
                    remedy="resume from an earlier checkpoint (--resume STEP); remove the forward, hook or callback "
                    "that writes this parameter in one stage only",
                )


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- removing ----------------------------------------------------------------------------------------------------------


def _remove(directory: Path) -> None:
    """Remove a checkpoint. It is renamed first: a checkpoint that is half removed must not look like one."""
    shutil.rmtree(_rename(directory, ".old"))


def _rename(directory: Path, suffix: str) -> Path:
    """Add a suffix to the name of a checkpoint, and return its new path."""
    path = directory.with_name(directory.name + suffix)
    shutil.rmtree(path, ignore_errors=True)
    directory.rename(path)
    return path


def clear_unfinished(checkpoints: Path) -> None:
    """Remove what a crash left half written or half removed. No process may be writing there.

    A checkpoint that was to be replaced, by one that has not taken its place, is put back.
    """
    for replaced in checkpoints.glob(f"step-*{_REPLACED}"):
        place = replaced.with_suffix("")
        if place.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(place)
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        if not _INCOMPLETE.fullmatch(path.name):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def set_aside(checkpoints: Path, step: int) -> list[int]:
    """Rename the checkpoints of steps after ``step`` to ``step-N.abandoned``, and return their steps.

    They belong to a run that is given up by resuming from an earlier checkpoint. The resumed run must never use them.
    """
    clear_unfinished(checkpoints)
    later_steps = [each for each in steps(checkpoints) if each > step]
    for later in later_steps:
        aside = directory_of(checkpoints, later).with_suffix(".abandoned")
        shutil.rmtree(aside, ignore_errors=True)
        directory_of(checkpoints, later).rename(aside)
    return later_steps

"""The parts of a checkpoint: each process that runs a stage writes one, and rank 0 joins them in the manifest.

One replica of a stage writes its file. With ``--shard-optimizer`` the others write a file of their optimizer's state
too, and each member of a team a file of its slices. A part also has checksums of what the replicas of a stage, and the
copies of a tied parameter, must hold bit for bit: a checkpoint of one of them would not be that of the run otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autopipe import sparse
from autopipe.errors import ArtifactError, RunError, disk_is_full
from autopipe.ir import artifact
from autopipe.runtime.checkpoint.checkpoint import sha256_of
from autopipe.runtime.checkpoint.checksums import Sums
from autopipe.runtime.checkpoint.directory import directory_of, publish
from autopipe.runtime.checkpoint.manifest import Manifest, StageFile, StageState, TensorSlice
from autopipe.runtime.checkpoint.proof import refuse_other_file
from autopipe.runtime.checkpoint.snapshot import Snapshot

_MEMBER = "@member"


@dataclass(frozen=True, slots=True)
class Part:
    """What one process of a stage adds to a checkpoint."""

    stage: int
    # the tensors that it writes, copied; None: it writes no file
    snapshot: Snapshot | None
    # as in ``StageFile``
    training: StageState = field(default_factory=StageState)
    # a checksum of every tied parameter that it has, as owner or as copy
    ties: dict[str, int] = field(default_factory=dict)
    slices: dict[str, TensorSlice] = field(default_factory=dict)
    # which of the processes of the stage; the first ``writers`` of them write a file
    place: int = 0
    writers: int = 1
    # of the live tensors that the snapshot was made of
    written: Sums = field(default_factory=lambda: Sums({}))
    # of further tensors that must be equal to those of another process
    unwritten: Sums = field(default_factory=lambda: Sums({}))
    # tensors that must be equal in all processes that have them under the same name
    compared: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """The description of a part that is in an unfinished checkpoint."""

    file: StageFile | None
    ties: dict[str, int]
    checksums: dict[str, int]


def of_member(name: str, member: int) -> str:
    """Return the name under which a member's part of a tensor is compared between replicas."""
    return f"{name}{_MEMBER}{member}"


def descriptions(temporary: Path, processes: Sequence[int]) -> dict[tuple[int, int], Path]:
    """Return, for each process of each stage, the file that is present once its part of a checkpoint is.

    ``processes``: how many run each stage.
    """
    return {
        (stage, place): temporary / f"stage-{stage}-of-{len(processes)}.process-{place}-of-{count}.json"
        for stage, count in enumerate(processes)
        for place in range(count)
    }


def write_part(temporary: Path, part: Part, processes: Sequence[int]) -> None:
    """Write the file of one process of a stage, if it has one, and then its description.

    Raises: ArtifactError if the disk refuses it; RunError if the file does not hold what was trained.
    """
    sums = part.written.finish()
    file = None
    if part.snapshot is not None:
        number = f".part-{part.place}-of-{part.writers}" if part.writers > 1 else ""
        path = temporary / f"stage-{part.stage}-of-{len(processes)}{number}.safetensors"
        digest, size = _write_file(path, part.stage, part.snapshot, sums)
        file = StageFile(path.name, digest, size, part.snapshot.names, part.training, slices=part.slices)
    sums.update(part.unwritten.finish())
    checksums = {
        compared + key.removeprefix(name): sums[key]
        for name, keys in sparse.names_in(sums).items()
        if (compared := part.compared.get(name))
        for key in keys
    }
    artifact.save(WrittenPart(file, part.ties, checksums), descriptions(temporary, processes)[part.stage, part.place])


def _write_file(path: Path, stage: int, snapshot: Snapshot, sums: Mapping[str, int]) -> tuple[str, int]:
    """Write a file, compare it with what was trained, and return its SHA-256 and its size in bytes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        snapshot.write(path)
        refuse_other_file(path, sums)
        return sha256_of(path), path.stat().st_size
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()  # on a full disk, a part of it would take the room for anything else
        raise ArtifactError(
            f"the checkpoint of stage {stage} cannot be written: {error.strerror or error}",
            where=str(path),
            remedy="free space on that disk; --keep-checkpoints limits the number of checkpoints"
            if disk_is_full(error, path.parent)
            else "make its folder writable, or give another --run-dir",
        ) from error


def finish(checkpoints: Path, temporary: Path, processes: Sequence[int], manifest: Manifest, keep: int) -> Path:
    """Join the parts of all stages in the manifest, make the checkpoint the latest one, and return its directory.

    ``processes``: how many run each stage. ``keep``: how many of the newest checkpoints are kept; 0 keeps all.

    Raises: ArtifactError if it cannot be written; RunError if the copies of a tied parameter or the replicas of a stage
    differ.
    """
    described = descriptions(temporary, processes)
    parts = {
        process: artifact.load(WrittenPart, path, renew="save the checkpoint again")
        for process, path in described.items()
    }
    for stage, count in enumerate(processes):
        refuse_unequal_replicas(stage, [parts[stage, place].checksums for place in range(count)])
    refuse_unequal_ties({process: part.ties for process, part in parts.items()})
    final = directory_of(checkpoints, manifest.step)
    files = tuple(part.file for part in parts.values() if part.file is not None)
    artifact.save(replace(manifest, files=files), temporary / "manifest.json")
    try:
        for path in described.values():
            path.unlink()
        publish(temporary, final, keep)
    except OSError as error:
        raise ArtifactError(f"the checkpoint cannot be finished: {error.strerror}", where=str(final)) from error
    return final


def refuse_unequal_replicas(stage: int, processes: Sequence[Mapping[str, int]]) -> None:
    """Refuse a checkpoint whose replicas of a stage do not hold the same state.

    ``processes`` are the checksums of each process of the stage. A tensor of ``of_member`` is the same in all replicas,
    and another one in each member of a team.

    Raises: RunError naming the first tensor that differs.
    """
    of_members: dict[str, int] = {}
    whole: list[dict[str, int]] = []
    for number, each in enumerate(processes):
        whole.append({name: checksum for name, checksum in each.items() if _MEMBER not in name})
        for name in each.keys() - whole[-1].keys():
            if of_members.setdefault(name, each[name]) != each[name]:
                raise _unequal(stage, number, name.partition(_MEMBER)[0])
    first, *others = whole
    for number, other in enumerate(others, start=1):
        if other != first:
            name = min(name for name in {**first, **other} if first.get(name) != other.get(name))
            raise _unequal(stage, number, name)


def _unequal(stage: int, number: int, name: str) -> RunError:
    return RunError(
        f"the replicas or members of stage {stage} are no longer equal: number {number} of them differs from the first "
        f"in {name}",
        remedy="resume from an earlier checkpoint (--resume STEP); remove the forward, hook or callback that computes "
        "another value on each rank, or train with --replicas never and without --tensor-parallel",
    )


def refuse_unequal_ties(processes: Mapping[tuple[int, int], Mapping[str, int]]) -> None:
    """Refuse a checkpoint of a run whose copies of a tied parameter differ.

    ``processes``: the checksums of the tied parameters of each process, by (stage, number in the stage).

    Raises: RunError naming the parameter.
    """
    copies: dict[str, tuple[int, str]] = {}
    for (stage, number), ties in processes.items():
        process = f"number {number} of stage {stage}"
        for name, bits in ties.items():
            expected, other = copies.setdefault(name, (bits, process))
            if expected != bits:
                parameter = name.partition(_MEMBER)[0]
                raise RunError(
                    f"{parameter} is tied, and its copies are no longer equal: {other} and {process} differ",
                    remedy="resume from an earlier checkpoint (--resume STEP); remove the forward, hook or callback "
                    "that writes this parameter in one stage only",
                )

"""Checkpoints: one directory a step, safetensors per stage, and a manifest by original parameter name.

Written to ``step-N.PLAN.tmp``, flushed to the disk, renamed, and only then named in ``latest``: a crash leaves the old
one or the new one, never a mixture. Nothing in it can run code, and every file that is read is compared with its
SHA-256. Any plan can load what any other plan saved, because everything is kept under the model's own names.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from autopipe import sparse
from autopipe.errors import ArtifactError, RunError
from autopipe.ir import artifact
from autopipe.ir.artifact import write_text
from autopipe.runtime.checkpoint.snapshot import Snapshot

_FILE = re.compile(r"stage-\d+-of-\d+\.safetensors")
_STEP = re.compile(r"step-(\d{8,})")
_HALF = re.compile(r"step-\d{8,}(\.\w+)?\.(tmp|old)|\.latest\.\d+\.tmp")


@dataclass(frozen=True, slots=True)
class StageState:
    """``owned``: the parameters that the stage steps. ``state``: its optimizer and scheduler, in typed JSON.

    ``initial``: the same as the user's hooks built it, without tensors, so that an edited hook is noticed. Both are
    None for a stage that trains nothing. See ``runtime.training_state``.
    """

    owned: tuple[str, ...] = ()
    state: Any = None
    initial: Any = None


@dataclass(frozen=True, slots=True)
class StageFile:
    """What one stage wrote. ``tensors``: names in the file, such as ``model.wte.weight``. ``training``: beside them.

    ``ties``: of every tied parameter that the stage holds, as owner or as copy, a sum of its bits: copies must be equal
    to the last one. ``groups``, ``scheduler``: what an earlier format kept of the optimizer; nothing reads them.
    """

    file: str
    sha256: str
    bytes: int
    tensors: tuple[str, ...]
    training: StageState = StageState()
    ties: dict[str, int] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """The options that decide what is trained, as the run had them when it wrote a checkpoint.

    ``optimizer``: "" for the file's own. ``lr``: None for the optimizer's own. ``batch_size`` 0: the data decides.
    """

    optimizer: str = ""
    lr: float | None = None
    precision: str = "fp32"
    batch_size: int = 0
    num_microbatches: int = 1
    clip_grad_norm: float = 0.0
    deferred_batch_norm: bool = False
    schedule: str = ""
    ema: float = 0.0


@dataclass(frozen=True, slots=True)
class Manifest:
    """``step``: optimizer steps done. ``epoch``/``position``: where the data goes on.

    ``scale``/``good_steps``: of the loss in float16, 0 elsewhere. ``data``: digest of the ``position`` minibatches that
    were read of the epoch, "" in a checkpoint that was written without one. ``options``: None in a
    checkpoint of the earlier format, which does not hold the whole state of optimizers either.
    """

    step: int
    epoch: int
    position: int
    seed: int
    graph_digest: str
    plan_digest: str
    files: tuple[StageFile, ...]
    scale: float = 0.0
    good_steps: int = 0
    data: str = ""
    options: TrainingOptions | None = None

    def __post_init__(self) -> None:
        if min(self.step, self.epoch, self.position, self.good_steps, self.scale) < 0:
            raise ValueError("steps, epochs, positions and the scale of the loss are not negative")
        if len({stage.file for stage in self.files}) < len(self.files):
            raise ValueError("two stages have the same file")


def directory_of(checkpoints: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint."""
    return checkpoints / f"step-{step:08d}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unfinished(checkpoints: Path, step: int, plan_digest: str) -> Path:
    """Return the directory in which a step's checkpoint is made.

    One a plan: a host that was cut off may still be writing its part of an attempt that the others have given up, and
    gone on from under another plan. Under the same plan it would write the same.
    """
    return checkpoints / f"step-{step:08d}.{plan_digest}.tmp"


def description(temporary: Path, index: int) -> Path:
    """Return the file that says, in a checkpoint that is being made, that a stage has written its part."""
    return temporary / f"stage-{index}.json"


def write_stage(
    temporary: Path,
    index: int,
    num_stages: int,
    snapshot: Snapshot,
    training: StageState,
    ties: dict[str, int] | None = None,
) -> None:
    """Write one stage's file and its description into the directory that is being made.

    Raises: ArtifactError where the disk does not take it.
    """
    name = f"stage-{index}-of-{num_stages}.safetensors"
    path = temporary / name
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        sha256, size = snapshot.write(path)
    except OSError as error:
        raise ArtifactError(
            f"the checkpoint of stage {index} cannot be written: {error.strerror or error}",
            where=str(path),
            remedy="make room on the disk; --keep-checkpoints says how many stay",
        ) from error
    artifact.save(StageFile(name, sha256, size, snapshot.names, training, ties or {}), description(temporary, index))


def finish(checkpoints: Path, temporary: Path, num_stages: int, manifest: Manifest, keep: int) -> Path:
    """Collect what the stages wrote into the manifest, and make the checkpoint the latest one.

    ``keep``: how many of the newest stay; 0 keeps all. Returns its directory.

    Raises: ArtifactError if the disk does not take it; RunError if the copies of a tied parameter differ.
    """
    files = tuple(
        artifact.load(StageFile, description(temporary, index), renew="save the checkpoint again")
        for index in range(num_stages)
    )
    _refuse_unequal_ties(files)
    final = directory_of(checkpoints, manifest.step)
    artifact.save(replace(manifest, files=files), temporary / "manifest.json")
    try:
        for index in range(num_stages):
            description(temporary, index).unlink()
        _sync_directory(temporary)
        if final.exists():
            _remove(final)
        temporary.rename(final)
        _sync_directory(checkpoints)
        write_text(checkpoints / "latest", final.name + "\n")
        for old in steps(checkpoints)[:-keep] if keep else []:
            _remove(directory_of(checkpoints, old))
    except OSError as error:
        raise ArtifactError(f"the checkpoint cannot be finished: {error.strerror}", where=str(final)) from error
    return final


def _refuse_unequal_ties(files: Sequence[StageFile]) -> None:
    seen: dict[str, tuple[int, str]] = {}
    for stage in files:
        for name, bits in stage.ties.items():
            first, where = seen.setdefault(name, (bits, stage.file))
            if first != bits:
                raise RunError(
                    f"{name} is tied, and its copies are no longer equal: {where} and {stage.file} hold others",
                    remedy="go on from an earlier checkpoint (--resume STEP); a forward, hook or callback that writes "
                    "this parameter in one stage alone parts the copies: leave it out",
                )


def _remove(directory: Path) -> None:
    """Remove a checkpoint. Under another name first: one that is half removed must not look like one."""
    doomed = directory.with_name(directory.name + ".old")
    shutil.rmtree(doomed, ignore_errors=True)
    directory.rename(doomed)
    shutil.rmtree(doomed)


def clear_unfinished(checkpoints: Path) -> None:
    """Remove what a crash left half written or half removed. Nobody may be writing."""
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        if not _HALF.fullmatch(path.name):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def set_aside(checkpoints: Path, step: int) -> list[int]:
    """Rename the checkpoints of steps after ``step`` to ``step-N.abandoned``, and return their steps.

    They are of a run that is given up by going on from an earlier one, and must never be taken for this one's.
    """
    clear_unfinished(checkpoints)
    later = [found for found in steps(checkpoints) if found > step]
    for found in later:
        aside = directory_of(checkpoints, found).with_suffix(".abandoned")
        shutil.rmtree(aside, ignore_errors=True)
        directory_of(checkpoints, found).rename(aside)
    return later


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def steps(checkpoints: Path) -> list[int]:
    """Return the steps that a checkpoint was finished for, ascending. Whether it still is whole, ``verify`` says."""
    if not checkpoints.is_dir():
        return []
    found = [_STEP.fullmatch(path.name) for path in checkpoints.iterdir()]
    return sorted(int(match[1]) for match in found if match)


def intact(checkpoints: Path) -> list[int]:
    """Return the steps whose checkpoint is whole, ascending. Reads every file of every one of them."""
    found = []
    for step in steps(checkpoints):
        with contextlib.suppress(ArtifactError):
            Checkpoint(directory_of(checkpoints, step)).verify()
            found.append(step)
    return found


class Checkpoint:
    """A checkpoint to read from.

    Raises: ArtifactError for a missing, truncated or changed file, naming it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = artifact.load(
            Manifest, directory / "manifest.json", renew="an earlier checkpoint (--resume STEP)"
        )
        self._file_of: dict[str, str] = {}
        for stage in self.manifest.files:
            if not _FILE.fullmatch(stage.file):
                raise ArtifactError(
                    f"{stage.file!r} is no name for a stage's file", where=str(directory / "manifest.json")
                )
            self._file_of.update(dict.fromkeys(stage.tensors, stage.file))
        self._verified: set[str] = set()

    def verify(self) -> None:
        """Read everything once. Raises: ArtifactError naming the first file that is not what was written."""
        for stage in self.manifest.files:
            with _opened(self._verify(stage.file)) as file:
                lacking = sorted(set(stage.tensors) - set(sparse.names_in(file.keys())))
                if lacking:
                    raise ArtifactError(f"{stage.file} lacks {lacking[0]!r}", where=str(self.directory / stage.file))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor it holds, by name."""
        found: dict[str, tuple[int, ...]] = {}
        for stage in self.manifest.files:
            with _opened(self._verify(stage.file)) as file:
                keys = sparse.names_in(file.keys())
                found.update({name: sparse.shape_of(keys[name], name, file) for name in stage.tensors})
        return found

    @staticmethod
    def latest(checkpoints: Path) -> Checkpoint | None:
        """Return the newest complete checkpoint, None where there is none."""
        found = steps(checkpoints)
        return Checkpoint(directory_of(checkpoints, found[-1])) if found else None

    @property
    def stages(self) -> tuple[StageState, ...]:
        """What each stage stored beside its tensors."""
        return tuple(stage.training for stage in self.manifest.files)

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor it holds."""
        return tuple(sorted(self._file_of))

    def _verify(self, file: str) -> Path:
        path = self.directory / file
        if file in self._verified:
            return path
        expected = next(stage for stage in self.manifest.files if stage.file == file)
        remedy = "go on from an earlier checkpoint"
        if not path.is_file():
            raise ArtifactError(f"{file} is missing from the checkpoint", where=str(path), remedy=remedy)
        try:
            same = path.stat().st_size == expected.bytes and _sha256(path) == expected.sha256
        except OSError as error:
            raise ArtifactError(f"{file} cannot be read: {error.strerror}", where=str(path), remedy=remedy) from None
        if not same:
            raise ArtifactError(f"{file} is not what was written: its SHA-256 differs", where=str(path), remedy=remedy)
        self._verified.add(file)
        return path

    def read(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Return the named tensors, reading only them. Raises: ArtifactError for a name that it does not hold."""
        missing = [name for name in names if name not in self._file_of]
        if missing:
            raise ArtifactError(
                f"the checkpoint does not hold {missing[0]!r} ({len(missing)} missing)", where=str(self.directory)
            )
        tensors: dict[str, torch.Tensor] = {}
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._file_of[name], []).append(name)
        for file, wanted in by_file.items():
            with _opened(self._verify(file)) as opened:
                keys = sparse.names_in(opened.keys())
                for name in wanted:
                    # memory of its own: the file may be removed, and kernels round by how memory is aligned
                    tensors[name] = sparse.decoded(keys[name], name, opened.get_tensor).clone()
        return tensors


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file of tensors. Raises: ArtifactError where it, or what is read from it, is none."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, ValueError) as error:
        raise ArtifactError(f"{path.name} is damaged: {error}", where=str(path)) from error

"""Checkpoints: one directory a step, safetensors per stage, and a manifest by original parameter name.

Written to ``step-N.tmp``, flushed to the disk, renamed, and only then named in ``latest``: a crash leaves the old one
or the new one, never a mixture. Nothing in it can run code, and every file that is read is compared with its SHA-256.
Any plan can load what any other plan saved, because everything is kept under the model's own names.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from autopipe.errors import ArtifactError
from autopipe.ir import artifact
from autopipe.ir.artifact import write_text

_FILE = re.compile(r"stage-\d+-of-\d+\.safetensors")
_STEP = re.compile(r"step-(\d{8})")


@dataclass(frozen=True, slots=True)
class StageFile:
    """What one stage wrote. ``tensors``: names in the file, such as ``model.wte.weight``.

    ``groups``: per parameter, the numbers of its optimizer group. ``scheduler``: its state.
    """

    file: str
    sha256: str
    bytes: int
    tensors: tuple[str, ...]
    groups: dict[str, dict[str, float]]
    scheduler: dict[str, float]


@dataclass(frozen=True, slots=True)
class Manifest:
    """``step``: optimizer steps done. ``epoch``/``position``: where the data goes on.

    ``scale``/``good_steps``: of the loss in float16, 0 elsewhere.
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


def directory_of(checkpoints: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint."""
    return checkpoints / f"step-{step:08d}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_stage(
    temporary: Path,
    index: int,
    num_stages: int,
    tensors: Mapping[str, torch.Tensor],
    groups: dict[str, dict[str, float]],
    scheduler: dict[str, float],
) -> None:
    """Write one stage's file and its description into the directory that is being made.

    Raises: ArtifactError where the disk does not take it.
    """
    name = f"stage-{index}-of-{num_stages}.safetensors"
    path = temporary / name
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        save_file({key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}, path)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        size = path.stat().st_size
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"the checkpoint of stage {index} cannot be written: {error}", where=str(path)) from error
    description = StageFile(name, _sha256(path), size, tuple(sorted(tensors)), groups, scheduler)
    artifact.save(description, temporary / f"stage-{index}.json")


def finish(checkpoints: Path, temporary: Path, num_stages: int, manifest: Manifest, keep: int) -> Path:
    """Collect what the stages wrote into the manifest, and make the checkpoint the latest one.

    ``keep``: how many of the newest stay; 0 keeps all. Returns its directory.
    """
    files = tuple(
        artifact.load(StageFile, temporary / f"stage-{index}.json", renew="save the checkpoint again")
        for index in range(num_stages)
    )
    final = directory_of(checkpoints, manifest.step)
    complete = replace(manifest, files=files)
    artifact.save(complete, temporary / "manifest.json")
    for index in range(num_stages):
        (temporary / f"stage-{index}.json").unlink()
    _sync_directory(temporary)
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    _sync_directory(checkpoints)
    write_text(checkpoints / "latest", final.name + "\n")
    for old in steps(checkpoints)[:-keep] if keep else []:
        shutil.rmtree(directory_of(checkpoints, old))
    return final


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def steps(checkpoints: Path) -> list[int]:
    """Return the steps that have a complete checkpoint, ascending."""
    if not checkpoints.is_dir():
        return []
    found = [(_STEP.fullmatch(path.name), path) for path in checkpoints.iterdir()]
    return sorted(int(match[1]) for match, path in found if match and (path / "manifest.json").is_file())


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
        self.groups: dict[str, dict[str, float]] = {}
        self.scheduler: dict[str, float] = {}
        for stage in self.manifest.files:
            if not _FILE.fullmatch(stage.file):
                raise ArtifactError(
                    f"{stage.file!r} is no name for a stage's file", where=str(directory / "manifest.json")
                )
            self._file_of.update(dict.fromkeys(stage.tensors, stage.file))
            self.groups.update(stage.groups)
            self.scheduler = self.scheduler or stage.scheduler
        self._verified: set[str] = set()

    @staticmethod
    def latest(checkpoints: Path) -> Checkpoint | None:
        """Return the newest complete checkpoint, None where there is none."""
        found = steps(checkpoints)
        return Checkpoint(directory_of(checkpoints, found[-1])) if found else None

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
        if path.stat().st_size != expected.bytes or _sha256(path) != expected.sha256:
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
            try:
                with safe_open(self._verify(file), framework="pt") as opened:
                    for name in wanted:
                        # memory of its own: the file may be removed, and kernels round by how memory is aligned
                        tensors[name] = opened.get_tensor(name).clone()
            except SafetensorError as error:
                raise ArtifactError(f"{file} is damaged: {error}", where=str(self.directory / file)) from error
        return tensors

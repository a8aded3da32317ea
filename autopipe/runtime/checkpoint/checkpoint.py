"""``Checkpoint``: reads a finished checkpoint. Every file that is read is compared with its SHA-256.

Any plan can load what any other plan saved, because tensors are kept under the model's own names.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from autopipe import sparse
from autopipe.errors import ArtifactError
from autopipe.ir import artifact
from autopipe.runtime.checkpoint.directory import directory_of, steps
from autopipe.runtime.checkpoint.manifest import Manifest, StageState

_FILE = re.compile(r"stage-\d+-of-\d+\.safetensors")


def intact(checkpoints: Path) -> list[int]:
    """Return the steps whose checkpoint is intact, ascending. Reads every file of every checkpoint."""
    intact_steps = []
    for step in steps(checkpoints):
        with contextlib.suppress(ArtifactError):
            Checkpoint(directory_of(checkpoints, step)).verify()
            intact_steps.append(step)
    return intact_steps


class Checkpoint:
    """A finished checkpoint.

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
                    f"{stage.file!r} is not the name of a stage's file", where=str(directory / "manifest.json")
                )
            self._file_of.update(dict.fromkeys(stage.tensors, stage.file))
        self._verified: set[str] = set()

    def verify(self) -> None:
        """Read everything once. Raises: ArtifactError naming the first file that differs from what was written."""
        for stage in self.manifest.files:
            with _opened(self._verify(stage.file)) as file:
                lacking = sorted(set(stage.tensors) - set(sparse.names_in(file.keys())))
                if lacking:
                    raise ArtifactError(f"{stage.file} lacks {lacking[0]!r}", where=str(self.directory / stage.file))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for stage in self.manifest.files:
            with _opened(self._verify(stage.file)) as file:
                keys = sparse.names_in(file.keys())
                shapes.update({name: sparse.shape_of(keys[name], name, file) for name in stage.tensors})
        return shapes

    @staticmethod
    def latest(checkpoints: Path) -> Checkpoint | None:
        """Return the newest finished checkpoint, or None."""
        finished = steps(checkpoints)
        return Checkpoint(directory_of(checkpoints, finished[-1])) if finished else None

    @property
    def stages(self) -> tuple[StageState, ...]:
        """The training state of each stage."""
        return tuple(stage.training for stage in self.manifest.files)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return tuple(sorted(self._file_of))

    def _verify(self, file: str) -> Path:
        path = self.directory / file
        if file in self._verified:
            return path
        expected = next(stage for stage in self.manifest.files if stage.file == file)
        remedy = "resume from an earlier checkpoint (--resume STEP)"
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
        """Return the named tensors, reading only them. Raises: ArtifactError for a name that the checkpoint lacks."""
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
                    # a copy: the file may be removed, and kernels round by how memory is aligned
                    tensors[name] = sparse.decoded(keys[name], name, opened.get_tensor).clone()
        return tensors


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file of tensors. Raises: ArtifactError if the file, or what the body reads from it, is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, ValueError) as error:
        raise ArtifactError(f"{path.name} is damaged: {error}", where=str(path)) from error

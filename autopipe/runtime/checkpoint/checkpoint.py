"""``Checkpoint``: reads a finished checkpoint. Every file that is read is compared with its SHA-256.

Any plan can load what any other plan saved, because tensors are kept under the model's own names. A tensor may lie in
several files; it is read as a whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from autopipe import sparse
from autopipe.errors import ArtifactError
from autopipe.ir import artifact
from autopipe.runtime.checkpoint.directory import directory_of, steps
from autopipe.runtime.checkpoint.manifest import Manifest, StageState, TensorSlice

_FILE = re.compile(r"stage-\d+-of-\d+(\.part-\d+-of-\d+)?\.safetensors")
_REMEDY = "use an earlier checkpoint of the run (--resume STEP, --init-from DIRECTORY, export --step)"


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
        # name -> file -> what the file has of it, None: all
        self._slices: dict[str, dict[str, TensorSlice | None]] = {}
        for stage in self.manifest.files:
            if not _FILE.fullmatch(stage.file):
                raise ArtifactError(
                    f"manifest.json is damaged: {stage.file!r} is not the name of a stage's file",
                    where=str(directory / "manifest.json"),
                    remedy=_REMEDY,
                )
            for name in stage.tensors:
                self._slices.setdefault(name, {})[stage.file] = stage.slices.get(name)
        for name, slices in self._slices.items():
            if set(slices.values()) == {None}:  # a buffer that several stages have is read from one
                self._slices[name] = dict([slices.popitem()])
            elif not _complete(list(slices.values())):
                raise ArtifactError(
                    f"manifest.json is damaged: it does not list every slice of {name!r} once",
                    where=str(directory / "manifest.json"),
                    remedy=_REMEDY,
                )
        self._verified: set[str] = set()

    def verify(self) -> None:
        """Read everything once. Raises: ArtifactError naming the first file that differs from what was written."""
        for stage in self.manifest.files:
            with _opened(self._verify(stage.file)) as file:
                lacking = sorted(set(stage.tensors) - set(sparse.names_in(file.keys())))
                if lacking:
                    raise ArtifactError(
                        f"{stage.file} lacks tensor {lacking[0]!r}, which manifest.json lists",
                        where=str(self.directory / stage.file),
                        remedy=_REMEDY,
                    )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, by name."""
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for file, own in self._by_file(self.names).items():
            with _opened(self._verify(file)) as opened:
                keys = sparse.names_in(opened.keys())
                for name in own:
                    shape = sparse.shape_of(keys[name], name, opened)
                    parts.setdefault(name, {})[file] = torch.empty(shape, device="meta")
        return {name: tuple(self._joined(name, tensors).shape) for name, tensors in parts.items()}

    @staticmethod
    def latest(checkpoints: Path) -> Checkpoint | None:
        """Return the newest finished checkpoint, or None."""
        finished = steps(checkpoints)
        return Checkpoint(directory_of(checkpoints, finished[-1])) if finished else None

    @property
    def stages(self) -> tuple[StageState, ...]:
        """The training state of each file; empty for a file that is not the first of its stage."""
        return tuple(stage.training for stage in self.manifest.files)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return tuple(sorted(self._slices))

    def slices(self, name: str) -> Mapping[str, TensorSlice | None]:
        """Return what each file has of a tensor, None for all of it; {} if the checkpoint lacks the tensor."""
        return self._slices.get(name, {})

    def _verify(self, file: str) -> Path:
        path = self.directory / file
        if file in self._verified:
            return path
        expected = next(stage for stage in self.manifest.files if stage.file == file)
        if not path.is_file():
            raise ArtifactError(f"{file} is missing from the checkpoint", where=str(path), remedy=_REMEDY)
        try:
            same = path.stat().st_size == expected.bytes and sha256_of(path) == expected.sha256
        except OSError as error:
            raise ArtifactError(f"{file} cannot be read: {error.strerror}", where=str(path), remedy=_REMEDY) from None
        if not same:
            raise ArtifactError(f"{file} is not what was written: its SHA-256 differs", where=str(path), remedy=_REMEDY)
        self._verified.add(file)
        return path

    def read(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Return the named tensors, reading only them. Raises: ArtifactError for a name that the checkpoint lacks."""
        missing = [name for name in names if name not in self._slices]
        if missing:
            raise ArtifactError(
                f"the checkpoint does not hold {missing[0]!r} ({len(missing)} missing)", where=str(self.directory)
            )
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for file, wanted in self._by_file(names).items():
            with _opened(self._verify(file)) as opened:
                keys = sparse.names_in(opened.keys())
                for name in wanted:
                    # a copy: the file may be removed, and kernels round by how memory is aligned
                    tensor = sparse.decoded(keys[name], name, opened.get_tensor).clone()
                    parts.setdefault(name, {})[file] = tensor
        return {name: self._joined(name, parts[name]) for name in names}

    def _by_file(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the files that have some of ``names``, with the names that each has."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            for file in self._slices[name]:
                by_file.setdefault(file, []).append(name)
        return by_file

    def _joined(self, name: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a tensor from what each file has of it."""
        slices = {part.index: file for file, part in self._slices[name].items() if part is not None}
        (taken, *_), (whole, *_) = self._slices[name].values(), parts.values()
        if taken is None:
            return whole
        dim, own = taken.dim, [parts[slices[i]] for i in range(taken.count)]
        try:
            if not taken.segments:
                return _interleaved(own, dim, taken.blocks)
            lengths = [length // taken.count for length, _ in taken.segments]
            segments = zip(*(torch.split(part, lengths, dim) for part in own), strict=True)
            joined = [
                _interleaved(each, dim, blocks) for each, (_, blocks) in zip(segments, taken.segments, strict=True)
            ]
            return torch.cat(joined, dim=dim)
        except (RuntimeError, IndexError) as error:
            raise ArtifactError(
                f"the slices of {name!r} do not fit together: {error}", where=str(self.directory), remedy=_REMEDY
            ) from None


def _interleaved(parts: Sequence[torch.Tensor], dim: int, blocks: int) -> torch.Tensor:
    """Return a tensor whose dimension consists of blocks, each of a range of every part."""
    divided = [torch.unflatten(part, dim, (blocks, -1)) for part in parts]
    return torch.cat(divided, dim=dim + 1).flatten(dim, dim + 1)


def _complete(slices: Sequence[TensorSlice | None]) -> bool:
    """Return whether these are all slices of one tensor."""
    first = slices[0]
    if first is None or len(slices) != first.count:
        return False
    return set(slices) == {replace(first, index=index) for index in range(first.count)}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file. Raises: OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file of tensors. Raises: ArtifactError if the file, or what the body reads from it, is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, ValueError) as error:
        raise ArtifactError(f"{path.name} is damaged: {error}", where=str(path), remedy=_REMEDY) from error

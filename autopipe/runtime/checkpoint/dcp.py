"""Distributed checkpoints of torch, read and written by one process.

Their ``.metadata`` is a pickle: reading it runs any code in it. Read only what the user trusts.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from autopipe.errors import ArtifactError


class Stored:
    """The tensors of a trusted distributed checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            metadata: Mapping[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
        except Exception as error:
            raise ArtifactError(
                f".metadata cannot be read: {type(error).__name__}: {error}",
                where=str(path),
                remedy="copy or download the weights again",
            ) from None
        self._dtypes = {name: entry.properties.dtype for name, entry in metadata.items() if hasattr(entry, "size")}
        self.shapes = {name: tuple(metadata[name].size) for name in self._dtypes}

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return some of them, reading only them. Raises: ArtifactError."""
        tensors = {name: torch.empty(self.shapes[name], dtype=self._dtypes[name]) for name in names}
        try:
            with _alone():
                load(tensors, checkpoint_id=self._path, no_dist=True)
        except Exception as error:
            raise ArtifactError(
                f"the checkpoint is damaged: {error}",
                where=str(self._path),
                remedy="copy or download the weights again",
            ) from None
        return tensors


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a distributed checkpoint of one process into a folder that does not exist."""
    with _alone():
        save(dict(tensors), checkpoint_id=path, no_dist=True)


def _alone() -> warnings.catch_warnings[None]:
    """Suppress the warning of torch that there is only one process, which is intended."""
    return warnings.catch_warnings(action="ignore")

"""torch's distributed checkpoints, as one process reads and writes them.

Their ``.metadata`` is a pickle, so reading one runs whatever was put into it: only what the user trusts comes here.
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
    """The tensors of a distributed checkpoint. It must be trusted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            found: Mapping[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
        except Exception as error:
            raise ArtifactError(f".metadata cannot be read: {type(error).__name__}: {error}", where=str(path)) from None
        self._dtypes = {name: entry.properties.dtype for name, entry in found.items() if hasattr(entry, "size")}
        self.shapes = {name: tuple(found[name].size) for name in self._dtypes}

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return some of them, reading only them. Raises: ArtifactError."""
        found = {name: torch.empty(self.shapes[name], dtype=self._dtypes[name]) for name in names}
        try:
            with _alone():
                load(found, checkpoint_id=self._path, no_dist=True)
        except Exception as error:
            raise ArtifactError(f"the checkpoint is damaged: {error}", where=str(self._path)) from None
        return found


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a distributed checkpoint of one process into a folder that is not there yet."""
    with _alone():
        save(dict(tensors), checkpoint_id=path, no_dist=True)


def _alone() -> warnings.catch_warnings[None]:
    """Keep torch from warning that there is one process only: it is meant."""
    return warnings.catch_warnings(action="ignore")

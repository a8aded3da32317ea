"""A file of tensors as the bytes that it has: JSON, then data. Proofs read it so, and not as ``Checkpoint`` does."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import torch
from safetensors.torch import _TYPES

from autopipe.errors import RunError
from autopipe.runtime.checkpoint.sharing import Sums

_DTYPES = {name: dtype for name, dtype in _TYPES.items() if dtype is not None}
NOT_AS_WRITTEN = (
    "resume from an earlier checkpoint (--resume STEP); if it happens again, test the memory and the disk of this "
    "machine, and look for code that changes weights or optimizers while a checkpoint is made or restored"
)
"""The remedy."""


def tensors_on_disk(path: Path) -> dict[str, torch.Tensor]:
    """Map a file of tensors into memory. Raises: OSError."""
    with path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(begin - 8))
        # torch.from_file takes no path that is not UTF-8; a private map is writable, as torch wants it
        data = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = (begin + offset for offset in entry["data_offsets"])
            own, dtype = data[first:last], _DTYPES[entry["dtype"]]
            if first % dtype.itemsize:
                own = own.clone()  # torch views only aligned memory as another type
            tensors[name] = own.view(dtype).view(entry["shape"])
    return tensors


def refuse_other_file(path: Path, sums: Sums) -> None:
    """Refuse a file that does not hold what was summed. Raises: RunError naming the first tensor that differs."""
    on_disk, expected = tensors_on_disk(path), sums.finish()
    written = Sums({name: on_disk[name] for name in expected if name in on_disk}).finish()
    for name, number in expected.items():
        if written.get(name) != number:
            raise RunError(
                f"{name} in the checkpoint is not what was trained: the file differs from the memory of the rank",
                where=str(path),
                remedy=NOT_AS_WRITTEN,
            )

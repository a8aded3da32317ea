"""What a file's optimizer and scheduler reach beside their state dicts: compared between two loads of the file."""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from autopipe.runtime.checkpoint.checksums import checksums
from autopipe.runtime.training_state.stage import Training
from autopipe.trace.state.snapshots.fingerprints import is_plain_key
from autopipe.trace.state.snapshots.settings import SETTINGS
from autopipe.trace.state.snapshots.snapshot import WHOLE, Snapshot


@dataclass(frozen=True, slots=True)
class Load:
    """One load of a file: what its hooks built."""

    training: Training
    # of the user's code
    modules: Sequence[types.ModuleType]


def unlike(first: Load, second: Load) -> set[str]:
    """Return the names of the places that two loads reach and whose values differ.

    A list in a global of the first that begins with the entries of the second has only grown: it counts as a log.
    """
    ours, theirs = _reached(first), _reached(second)
    unlike = {name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)}
    lists = {name for name in unlike if name.isidentifier()}  # others are of the optimizer or a closure
    grown = {name for name in lists if _length(ours.get(name)) > _length(theirs.get(name)) >= 0}
    begun = {name for name in grown if not any(entry.startswith(f"{name}[") and entry in theirs for entry in unlike)}
    return {name for name in unlike if not any(name == log or name.startswith(f"{log}[") for log in begun)}


_STORED = ("optimizer.state[", "optimizer.param_groups[")  # of an optimizer's state_dict, and compared with it


def _is_stored(name: str) -> bool:
    """Return whether a name is of an optimizer's state_dict, or of what torch adds to its defaults."""
    of_group = name.startswith(_STORED) and "['params'][" not in name
    return of_group or name in ("optimizer.defaults", "optimizer.defaults['differentiable']")


def _reached(load: Load) -> dict[str, list[Any]]:
    """Return the plain values, generators and tensors that optimizer, scheduler and files reach, by name."""
    owned = load.training.owned
    names = {id(parameter): name for name, parameter in owned.items()}
    roots = [*load.training.roots.items(), *((module.__name__, module) for module in load.modules)]
    snapshot = Snapshot.of(roots)
    reached: dict[str, list[Any]] = {}

    def add(name: str, content: Any) -> None:
        name = _ID.sub(lambda key: f"[{names.get(int(key[1]), key[1])}]", name)  # a key that is another in each load
        if not _is_stored(name):
            reached.setdefault(name, []).append(content)

    rate = load.training.optimizer.defaults.get("lr")  # a tensor of it changes with the groups that share it
    for (owner, key), value in snapshot.values.items():
        name, content = snapshot.names[owner, key], value[1] if value else None
        if not value or owner == id(SETTINGS):
            continue
        if value[0] == "is":
            if isinstance(content, torch.Tensor) and id(content) not in names:
                add(name, _bits(content))
        elif key == WHOLE and isinstance(content, tuple):  # a length and keys, some of which may be parameters
            keys = tuple(names.get(k, k) if is_plain_key(k) else type(k) for k in content[1:])
            add(name, _Container(content[0], keys))
        elif name != "optimizer.defaults['lr']" or not isinstance(rate, torch.Tensor):
            add(name, content)
    for own in snapshot.owners.values():
        if isinstance(own, nn.Module):
            for name, tensor in (*own.named_parameters(recurse=False), *own.named_buffers(recurse=False)):
                add(f"{type(own).__name__}.{name}", _bits(tensor))
        elif isinstance(own, nn.Parameter) and id(own) not in names:
            add(snapshot.names[id(own), "requires_grad"], _bits(own))
    return reached


_ID = re.compile(r"\[(\d{9,})\]")


def _bits(tensor: torch.Tensor) -> dict[str, int]:
    return {} if tensor.is_meta else checksums({"": tensor.detach()})


class _Container(NamedTuple):
    length: int
    keys: tuple[Any, ...]


def _length(values: list[Any] | None) -> int:
    """Return the length of a list or a deque, -1 for all else."""
    whole = values[0] if values and len(values) == 1 else None
    return whole.length if isinstance(whole, _Container) and not whole.keys else -1

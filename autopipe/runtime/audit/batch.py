"""A minibatch as files, with which another process computes: the same values, structure and strides.

Tensors are stored in a safetensors file, everything else in JSON. A tensor keeps its order in memory, because kernels
add up in another order over other strides.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from autopipe.errors import ArtifactError
from autopipe.ir.artifact import write_text
from autopipe.runtime.checkpoint.snapshot import Snapshot
from autopipe.runtime.step.loss_weights import Divisors
from autopipe.strides import memory_order, packed, unpacked

_PLAIN = (bool, int, float, str, type(None))
_JSON, _TENSORS = "batch.json", "batch.safetensors"


class UnstorableBatchError(ValueError):
    """A minibatch contains an object that is neither a tensor nor a plain value; the message names its type."""


def store(item: Any, divisors: Divisors | None, folder: Path) -> None:
    """Write a minibatch into a folder, with the divisors of the loss; None if these are the numbers of samples.

    Raises: UnstorableBatchError naming the first type that cannot be stored; OSError.
    """
    tensors: dict[str, Tensor] = {}
    tree = encoded(item, tensors)
    try:
        snapshot = Snapshot.of(tensors)
    except ArtifactError as error:
        raise UnstorableBatchError(error.what) from None
    folder.mkdir(parents=True, exist_ok=True)
    snapshot.write(folder / _TENSORS)
    write_text(folder / _JSON, json.dumps({"minibatch": tree, "divisors": divisors and dataclasses.asdict(divisors)}))


def load(folder: Path) -> tuple[Any, Divisors | None]:
    """Read a minibatch that ``store`` wrote, and the divisors of the loss.

    Raises: ArtifactError if the files are damaged.
    """
    try:
        document = json.loads((folder / _JSON).read_text(encoding="utf-8"))
        item = decoded(document["minibatch"], load_file(folder / _TENSORS))
        return item, document["divisors"] and Divisors(**document["divisors"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ArtifactError(f"the minibatch of an audit cannot be read: {error}", where=str(folder)) from error


def encoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON values, and add its tensors to ``tensors``: without gaps, on the host.

    Raises: UnstorableBatchError naming the first type that cannot be stored.
    """

    def stored(tensor: Tensor) -> dict[str, Any] | None:
        if tensor.layout is not torch.strided:
            return None
        name, order = str(len(tensors)), memory_order(tensor)
        tensors[name] = packed(tensor.detach().cpu(), order)
        return {"tensor": name, "shape": list(tensor.shape), "order": order}

    return tree_of(value, stored)


def decoded(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value of which ``encoded`` gave JSON values and tensors."""
    return value_of(tree, lambda entry: unpacked(tensors[entry["tensor"]].clone(), entry["shape"], entry["order"]))


def tree_of(value: Any, of_tensor: Callable[[Tensor], dict[str, Any] | None]) -> Any:
    """Return a value as JSON values. ``of_tensor``: those of a tensor, with the key "tensor"; None: it has none.

    Raises: UnstorableBatchError naming the first type that has none.
    """
    kind = type(value)
    if kind in _PLAIN:
        return {"value": value}
    if kind is Tensor and (entry := of_tensor(value)) is not None:
        return entry
    if kind in (list, tuple):
        return {kind.__name__: [tree_of(entry, of_tensor) for entry in value]}
    if kind is dict and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, tree_of(entry, of_tensor)] for key, entry in value.items()]}
    raise UnstorableBatchError(f"it contains a {kind.__module__}.{kind.__qualname__}")


def value_of(tree: Any, tensor_of: Callable[[Any], Tensor]) -> Any:
    """Return the value of which ``tree_of`` gave JSON values. ``tensor_of``: the tensor of which they are."""
    if "tensor" in tree:
        return tensor_of(tree)
    if "value" in tree:
        return tree["value"]
    if "dict" in tree:
        return {key: value_of(entry, tensor_of) for key, entry in tree["dict"]}
    sequence = [value_of(entry, tensor_of) for entry in tree.get("list", tree.get("tuple"))]
    return tuple(sequence) if "tuple" in tree else sequence

"""Sparse tensors: their dense parts, for files and comparisons. ``wide``: any tensor, for the size of a difference.

torch implements few operations for sparse layouts (COO, CSR, CSC, BSR, BSC): they have no ``equal``, storage or
strides. A safetensors file can store only dense tensors. A sparse tensor consists of a few dense tensors, its *parts*.
These are compared, counted, and stored under ``NAME@LAYOUT.PART``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

_MARK = "@"
_SIZE = "size"
# layout -> the parts of a tensor without its size, in the order of the constructor
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_LAYOUTS: dict[str, Any] = {str(layout).removeprefix("torch."): layout for layout in (torch.sparse_coo, *_COMPRESSED)}


def is_sparse(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a sparse layout."""
    return tensor.layout is not torch.strided and str(tensor.layout).removeprefix("torch.") in _LAYOUTS


def parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the dense parts of a sparse tensor, by ``LAYOUT.PART``. They share its memory.

    The part ``size`` is its shape. For a COO tensor, 1 is appended if it is coalesced (its indices are sorted and
    unique), else 0.
    """
    layout = str(tensor.layout).removeprefix("torch.")
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        entries = {"indices": tensor._indices(), "values": tensor._values()}
        size = [*tensor.shape, int(tensor.is_coalesced())]
    else:
        entries = {part: getattr(tensor, part)() for part in _COMPRESSED[tensor.layout]}
        size = [*tensor.shape]
    return {f"{layout}.{part}": entry for part, entry in (*entries.items(), (_SIZE, torch.tensor(size)))}


def from_parts(entries: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the tensor of the given ``parts``. Raises: ValueError if a part is missing or inconsistent."""
    layout = next(iter(entries), "").partition(".")[0]
    try:
        by_part = {key.removeprefix(f"{layout}."): entry for key, entry in entries.items()}
        size = by_part[_SIZE].tolist()
        if layout == "sparse_coo":
            *size, coalesced = size
            return torch.sparse_coo_tensor(
                by_part["indices"], by_part["values"], size, is_coalesced=bool(coalesced), check_invariants=True
            )
        compressed, plain, values = (by_part[part] for part in _COMPRESSED[_LAYOUTS[layout]])
        return torch.sparse_compressed_tensor(
            compressed, plain, values, size, layout=_LAYOUTS[layout], check_invariants=True
        )
    except (KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"the parts of a sparse tensor are inconsistent: {error}") from error


def encoded(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors as a file can store them: a sparse tensor as its parts, each under its own key."""
    dense: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if is_sparse(tensor):
            dense.update({f"{name}{_MARK}{part}": entry for part, entry in parts(tensor).items()})
        else:
            dense[name] = tensor
    return dense


def names_in(keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the names of the tensors in a file, each with its keys in the file."""
    names: dict[str, tuple[str, ...]] = {}
    for key in keys:
        name, mark, part = key.rpartition(_MARK)
        name = name if mark and part.partition(".")[0] in _LAYOUTS else key
        names[name] = (*names.get(name, ()), key)
    return names


def decoded(keys: Collection[str], name: str, get: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Return a tensor of a file. ``keys``: its keys, as from ``names_in``.

    Raises: ValueError as ``from_parts`` does.
    """
    if list(keys) == [name]:
        return get(name)
    return from_parts({key.removeprefix(name + _MARK): get(key) for key in keys})


def assembled(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the inverse of ``encoded``. Raises: ValueError as ``from_parts`` does."""
    return {name: decoded(keys, name, tensors.__getitem__) for name, keys in names_in(tensors).items()}


def shape_of(keys: Collection[str], name: str, file: Any) -> tuple[int, ...]:
    """Return the shape of a tensor in an open safetensors file, without reading its values."""
    if list(keys) == [name]:
        return tuple(file.get_slice(name).get_shape())
    size = next(key for key in keys if key.endswith(f".{_SIZE}"))
    numbers = [int(number) for number in file.get_tensor(size).tolist()]
    return tuple(numbers[:-1] if f"{_MARK}sparse_coo." in size else numbers)


def stored(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that hold the memory of a tensor: itself, or its parts."""
    return tuple(parts(tensor).values()) if is_sparse(tensor) else (tensor,)


def memory_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the memory that identifies a tensor: for a sparse one, the memory of its values."""
    if not is_sparse(tensor):
        return tensor.untyped_storage()
    values: torch.Tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    return values.untyped_storage()


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same layout, shape, values and indices."""
    if one.shape != other.shape or one.layout is not other.layout:
        return False
    if not is_sparse(one):
        return torch.equal(one, other)
    ours, theirs = parts(one), parts(other)
    return all(entry.shape == theirs[key].shape and torch.equal(entry, theirs[key]) for key, entry in ours.items())


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with a dense layout."""
    return tensor.to_dense() if is_sparse(tensor) else tensor


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor dense and in double precision, for comparisons: complex128 if it is complex, else float64.

    ``double()`` would drop the imaginary part.
    """
    return dense(tensor).to(torch.complex128 if tensor.is_complex() else torch.float64)

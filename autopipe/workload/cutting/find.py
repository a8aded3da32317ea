"""Find the dimension that counts the samples: from ``batch_dim``, or because it changes with the batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from autopipe.errors import ModelFileError
from autopipe.workload.batches.items import Item, containers, path_text, paths
from autopipe.workload.cutting.dimensions import LIST, REMEDY, WHOLE, BatchDimensions

SIZES = (5, 7, 11)
"""The batch sizes to request; the last one only if two dimensions of a tensor remain possible after the others."""


class SizeNotAvailable(Exception):  # noqa: N818  # not an error of the user's
    """The data does not give a batch of the requested size."""


def declared(value: Any, label: str, path: str) -> BatchDimensions:
    """Return the dimensions of ``batch_dim`` of a model file: one number for all tensors, or a structure of numbers.

    The structure is that of the batch or of its upper levels: ``(inputs, target)``, or a dict by name. None marks
    tensors that are never cut. Tensors that it omits count their samples in dimension 0.

    Raises: ModelFileError naming an entry that is neither a number nor None.
    """
    known: dict[str, int] = {}
    if isinstance(value, (tuple, list)) and len(value) != 2:
        raise _invalid_batch_dim(f"has {len(value)} entries", label, path)
    for place, entry in _entries((), value):
        where = path_text(place, isinstance(value, (tuple, list)))
        if entry is not None and (not isinstance(entry, int) or isinstance(entry, bool) or entry < 0):
            raise _invalid_batch_dim(f"has {entry!r}{f' at {where}' if where else ''}", label, path)
        known[where] = WHOLE if entry is None else entry
    return BatchDimensions(known)


def _entries(place: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _entries((*place, pytree.MappingKey(key)), entry)
    elif isinstance(value, (tuple, list)):
        for index, entry in enumerate(value):
            yield from _entries((*place, pytree.SequenceKey(index)), entry)
    else:
        yield place, value


def _invalid_batch_dim(problem: str, label: str, path: str) -> ModelFileError:
    return ModelFileError(
        f"batch_dim of {label} {problem}",
        where=path,
        remedy="give the dimension that counts the samples, from 0: one number, (inputs, target), or a dict by name",
    )


def is_plain(item: Item, batch_size: int) -> bool:
    """Return whether dimension 0, and no other, has the requested ``batch_size`` in every tensor."""
    return all(
        leaf.shape[0] == batch_size and batch_size not in leaf.shape[1:]
        for _, leaf in paths(item)
        if isinstance(leaf, Tensor) and leaf.dim() > 0
    )


def in_dimension_one(item: Item) -> BatchDimensions | None:
    """Return the dimensions of a batch if dimension 1 of its first tensor counts the samples; None if it cannot.

    A tensor counts them in dimension 1 if it is as long there, else in dimension 0, else it is never cut. The target
    and every tensor that a cut along dimension 0 would cut must have one of the two.
    """
    tensors = {path: leaf for path, leaf in paths(item) if isinstance(leaf, Tensor) and leaf.dim() > 0}
    first = next(iter(tensors.values()), None)
    if first is None or first.dim() < 2 or first.shape[1] < 2:
        return None
    count = first.shape[1]
    known = {
        path: 1 if leaf.dim() > 1 and leaf.shape[1] == count else 0 if leaf.shape[0] == count else WHOLE
        for path, leaf in tensors.items()
    }
    whole = [path for path, dimension in known.items() if dimension == WHOLE]
    if any(tensors[path].shape[0] == first.shape[0] or path.startswith("target") for path in whole):
        return None
    return BatchDimensions(known)


def infer(read: Callable[[int], Item]) -> BatchDimensions:
    """Return the dimensions that change with the batch size. ``read``: returns the first batch of a given size.

    The result is empty if no tensor follows the batch size.

    Raises: ModelFileError for a tensor in which two dimensions follow it; any exception of ``read``.
    """
    items = [read(size) for size in SIZES[:2]]
    batches, lists = [_shapes(item) for item in items], [_lengths(item) for item in items]
    sizes = _sizes([{**shapes, **lengths} for shapes, lengths in zip(batches, lists, strict=True)])
    if sizes is None:
        return BatchDimensions()
    samples = [path for path, dimensions in _following(lists, sizes).items() if dimensions]
    batches = [
        {path: shape for path, shape in shapes.items() if not path.startswith(tuple(f"{name}[" for name in samples))}
        for shapes in batches
    ]
    candidates = _following(batches, sizes)
    if any(len(dimensions) > 1 for dimensions in candidates.values()):
        batches.append(_shapes(read(SIZES[2])))
        candidates = _following(batches, (*sizes, SIZES[2]))
    for path, dimensions in candidates.items():
        if len(dimensions) > 1:
            raise ModelFileError(
                f"dimensions {' and '.join(map(str, dimensions))} of {path} are both as large as the batch; "
                "which of them counts the samples is not known",
                remedy=REMEDY,
            )
    known = {path: dimensions[0] if dimensions else WHOLE for path, dimensions in candidates.items()}
    known.update(dict.fromkeys(samples, LIST))
    return BatchDimensions(known if any(dimension != 0 for dimension in known.values()) else {})


def _shapes(item: Item) -> dict[str, tuple[int, ...]]:
    return {path: tuple(leaf.shape) for path, leaf in paths(item) if isinstance(leaf, Tensor) and leaf.dim() > 0}


def _lengths(item: Item) -> dict[str, tuple[int, ...]]:
    """Return the lengths of the lists and tuples in a batch, nested ones included."""
    return {path: (len(node),) for path, node in containers(item) if type(node) in (list, tuple)}


def _sizes(batches: list[dict[str, tuple[int, ...]]]) -> tuple[int, int] | None:
    """Return the numbers of samples of two batches: the requested ones, or less if the data is short."""
    few, many = batches
    pairs = {
        pair
        for path in few.keys() & many.keys()
        for pair in zip(few[path], many[path], strict=False)
        if pair[0] < pair[1]
    }
    if SIZES[:2] in pairs:
        return SIZES[:2]
    short = [pair for pair in pairs if pair[0] <= SIZES[0] and pair[1] <= SIZES[1]]
    return short[0] if len(short) == 1 else None


def _following(batches: list[dict[str, tuple[int, ...]]], sizes: tuple[int, ...]) -> dict[str, list[int]]:
    """Return, by path of a tensor in all batches, the dimensions that are as large as the batch in each of them."""
    common = set.intersection(*(set(batch) for batch in batches))
    return {
        path: [
            dimension
            for dimension in range(len(shape))
            if all(batch[path][dimension : dimension + 1] == (n,) for batch, n in zip(batches, sizes, strict=True))
        ]
        for path, shape in batches[0].items()
        if path in common
    }

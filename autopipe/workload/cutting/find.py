"""Which dimension counts the samples: what ``batch_dim`` says, or what changes with the batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from autopipe.errors import ModelFileError
from autopipe.workload.batches.items import Item, containers, path_text, paths
from autopipe.workload.cutting.dimensions import LIST, REMEDY, WHOLE, BatchDimensions

SIZES = (5, 7, 11)
"""The batch sizes that the data is asked for; the last one only where the first two leave two dimensions of a tensor
possible."""


class Unanswered(Exception):  # noqa: N818  # not an error of the user's
    """The data does not give a batch of the size that it was asked for."""


def declared(value: Any, label: str, path: str) -> BatchDimensions:
    """Return what ``batch_dim`` of a model file says: a number for all tensors, or a structure of numbers.

    The structure is that of the batch or of its upper part: ``(inputs, target)``, or a dict by name. None stands for
    tensors that are never cut. What is left out counts its samples in dimension 0.

    Raises: ModelFileError naming the entry that is neither.
    """
    known: dict[str, int] = {}
    if isinstance(value, (tuple, list)) and len(value) != 2:
        raise _undeclarable(f"has {len(value)} entries", label, path)
    for place, entry in _entries((), value):
        where = path_text(place, isinstance(value, (tuple, list)))
        if entry is not None and (not isinstance(entry, int) or isinstance(entry, bool) or entry < 0):
            raise _undeclarable(f"has {entry!r}{f' at {where}' if where else ''}", label, path)
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


def _undeclarable(problem: str, label: str, path: str) -> ModelFileError:
    return ModelFileError(
        f"batch_dim of {label} {problem}",
        where=path,
        remedy="give the dimension that counts the samples, from 0 on: one number, (inputs, target), or a dict by name",
    )


def is_plain(item: Item, batch_size: int) -> bool:
    """Tell whether dimension 0, and nothing else, counts the ``batch_size`` samples that the data was asked for."""
    return all(
        leaf.shape[0] == batch_size and batch_size not in leaf.shape[1:]
        for _, leaf in paths(item)
        if isinstance(leaf, Tensor) and leaf.dim() > 0
    )


def in_dimension_one(item: Item) -> BatchDimensions | None:
    """Return the dimensions of a batch whose samples dimension 1 of its first tensor counts; None where it cannot.

    A tensor counts them in dimension 1 where it is as long there, else in dimension 0, else it is never cut. What
    dimension 0 of the batch would cut must have one of them, and so must the target.
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


def asked(read: Callable[[int], Item]) -> BatchDimensions:
    """Return the dimensions that change with the batch size. ``read``: gives the first batch of so many samples.

    Nothing is known of tensors whose sizes do not follow the batch size in any batch: then the result is empty.

    Raises: ModelFileError for a tensor in which two dimensions do; whatever ``read`` raises.
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
                f"{path} has as many entries as the batch has samples in dimensions "
                f"{' and '.join(map(str, dimensions))}: which of them counts the samples is not known",
                remedy=REMEDY,
            )
    known = {path: dimensions[0] if dimensions else WHOLE for path, dimensions in candidates.items()}
    known.update(dict.fromkeys(samples, LIST))
    return BatchDimensions(known if any(dimension != 0 for dimension in known.values()) else {})


def _shapes(item: Item) -> dict[str, tuple[int, ...]]:
    return {path: tuple(leaf.shape) for path, leaf in paths(item) if isinstance(leaf, Tensor) and leaf.dim() > 0}


def _lengths(item: Item) -> dict[str, tuple[int, ...]]:
    """Return the lengths of the lists and tuples in a batch; of those in other ones that of the outermost."""
    return {path: (len(node),) for path, node in containers(item) if type(node) in (list, tuple)}


def _sizes(batches: list[dict[str, tuple[int, ...]]]) -> tuple[int, int] | None:
    """Return how many samples two batches have: what was asked for, or less where the data is short."""
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
    """Return, by path of a tensor that all batches have, the dimensions that are as large as the batch in each."""
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

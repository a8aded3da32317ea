"""``BatchDimensions``: the dimension of each tensor of a batch that counts the samples; cuts and resizes batches.

A tensor is cut along that dimension as by ``torch.tensor_split``. A tensor without such a dimension (a table, a class
weight) and every value that is not a tensor go unchanged to every microbatch. With the ``split`` hook, a function of
the user cuts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopipe.errors import ModelFileError, counted, with_article
from autopipe.workload.batches.items import Item, containers, normalised, path_text, paths, shapes
from autopipe.workload.batches.layouts import laid_out
from autopipe.workload.hooks.hook import Hook

WHOLE = -1  # in place of a dimension: a tensor that is never cut
LIST = -2  # in place of a dimension: a list with one entry per sample

REMEDY = (
    "define batch_dim in the model file, the dimension that counts the samples, such as batch_dim = 1 for "
    "sequence-first tensors; or split(batch, parts), which returns the microbatches of a batch; or train each batch "
    "whole: --num-microbatches 1"
)


@dataclass(frozen=True, slots=True)
class BatchDimensions:
    """The dimensions of the tensors of a batch that count the samples.

    A tensor that is not in ``known`` counts its samples in dimension 0 if that dimension is as large as the batch. The
    first tensor with a dimension gives the size of the batch.
    """

    #: By path of a tensor or of a container of tensors (``inputs[0]``, ``['ids']``, "" for all): the dimension, WHOLE
    #: or LIST. The longest path that leads to a tensor decides.
    known: Mapping[str, int] = field(default_factory=dict)

    def of(self, item: Item) -> dict[int, int]:
        """Return, by position among the leaves of an item, the dimension of each tensor that is cut.

        Raises: ModelFileError if a tensor does not have its known dimension.
        """
        leaves, structure = pytree.tree_flatten(item)
        tensors = {p: leaf for p, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() > 0}
        known = self._by_position(structure, isinstance(item, tuple)) if self.known else {}
        dimensions = {position: known[position] for position in tensors if known.get(position, WHOLE) >= 0}
        for position, dimension in dimensions.items():
            if dimension >= tensors[position].dim():
                raise _no_such_dimension(item, position, dimension)
        first = next(iter(dimensions), None)
        if first is None:
            first = next((position for position in tensors if position not in known), None)
        if first is None:
            return {}
        count = _entries(tensors[first], dimensions.get(first, 0))
        for position, leaf in tensors.items():
            if position not in known and leaf.shape[0] == count:
                dimensions[position] = 0
        return dict(sorted(dimensions.items()))

    def _by_position(self, structure: pytree.TreeSpec, pair: bool) -> dict[int, int]:
        try:
            leading = _leading_paths(structure, pair)
        except TypeError:  # a container of the user whose context is not hashable
            leading = _leading_paths.__wrapped__(structure, pair)
        return {
            position: next(self.known[path] for path in some if path in self.known)
            for position, some in enumerate(leading)
            if any(path in self.known for path in some)
        }

    @property
    def is_whole(self) -> bool:
        """Whether no part of a batch can be cut."""
        return self.known.get("") == WHOLE

    def is_fixed(self, item: Item) -> bool:
        """Return whether the number of samples is not a dimension of any tensor, as in a list of images."""
        return bool(self._lists(item)) or not self.of(item)

    def _lists(self, item: Item) -> list[Any]:
        """Return the lists that have one entry per sample."""
        wanted = {path for path, dimension in self.known.items() if dimension == LIST}
        return [node for path, node in containers(item) if path in wanted] if wanted else []

    def num_samples(self, item: Item) -> int:
        """Return the number of samples of an item.

        A batch that cannot be cut counts by the first tensor of its target, because losses average over it.

        Raises: ModelFileError if no tensor counts them.
        """
        leaves = pytree.tree_leaves(item)
        for position, dimension in self.of(item).items():
            return _entries(leaves[position], dimension)
        for samples in self._lists(item):
            return len(samples)
        if self.is_whole:
            targets = pytree.tree_leaves(item[1]) if isinstance(item, tuple) else []
            sizes = (leaf.shape[0] for leaf in (*targets, *leaves) if isinstance(leaf, Tensor) and leaf.dim() > 0)
            return int(next(sizes, 1))
        raise ModelFileError(
            "the batch has no tensor with a dimension",
            remedy="give samples-first tensors: dimension 0 counts the samples",
        )

    def split(self, item: Item, num_microbatches: int) -> list[Item]:
        """Cut an item as ``torch.tensor_split`` does, without empty parts.

        Raises: ModelFileError for more than one part of an item that cannot be cut.
        """
        if self.is_whole:
            if num_microbatches > 1:
                raise ModelFileError(
                    f"the batch cannot be cut into {num_microbatches} microbatches ({shapes(item)})", remedy=REMEDY
                )
            return [item]
        count = self.num_samples(item)
        parts = min(num_microbatches, count)
        if parts == 1:
            return [item]
        leaves, structure, dimensions = self._flat(item)
        places = torch.arange(count).tensor_split(parts)
        cut = [
            [type(leaf)(leaf[int(some[0]) : int(some[-1]) + 1]) for some in places]
            if dimensions.get(index) == LIST
            else leaf.tensor_split(parts, dimensions[index])
            if index in dimensions
            else (leaf,) * parts
            for index, leaf in enumerate(leaves)
        ]
        return [pytree.tree_unflatten([pieces[j] for pieces in cut], structure) for j in range(parts)]

    def resized(self, item: Item, batch_size: int) -> Item:
        """Return an item of exactly ``batch_size`` samples: the first ones, repeated if there are too few.

        Its tensors have the memory layout of those of ``item``.

        Raises: ModelFileError if the item has no samples.
        """
        count = self.num_samples(item)
        if count == batch_size:
            return item
        if count == 0:
            raise ModelFileError(
                f"the batch has no samples ({shapes(item)})", remedy="remove empty batches from the data"
            )
        if self.is_whole:
            return item
        index = torch.arange(batch_size) % count
        leaves, structure, dimensions = self._flat(item)
        for position, dimension in dimensions.items():
            leaf = leaves[position]
            if dimension == LIST:
                leaves[position] = type(leaf)(leaf[int(number)] for number in index)
                continue
            chosen = leaf.index_select(dimension, index.to(leaf.device))
            leaves[position] = laid_out(chosen, leaf).requires_grad_(leaf.requires_grad)
        changed: Item = pytree.tree_unflatten(leaves, structure)
        return changed

    def _flat(self, item: Item) -> tuple[list[Any], pytree.TreeSpec, dict[int, int]]:
        """Return the leaves of an item (a list of samples is one leaf), its structure, and the dimensions."""
        dimensions = self.of(item)
        lists = {id(node) for node in self._lists(item)}
        if not lists:
            leaves, structure = pytree.tree_flatten(item)
            return leaves, structure, dimensions
        by_tensor = {id(leaf): dimensions.get(position) for position, leaf in enumerate(pytree.tree_leaves(item))}
        leaves, structure = pytree.tree_flatten(item, is_leaf=lambda node: id(node) in lists)
        kinds = {
            position: LIST if id(leaf) in lists else by_tensor.get(id(leaf)) for position, leaf in enumerate(leaves)
        }
        cut = {position: dimension for position, dimension in kinds.items() if dimension is not None}
        return leaves, structure, cut

    def _unknown(self, item: Item, count: int) -> str:
        """Return an error for a tensor whose dimension is unknown because the inspected batch lacked it, or ""."""
        known = self._by_position(pytree.tree_structure(item), isinstance(item, tuple))
        for position, (path, leaf) in enumerate(paths(item)):
            if (
                isinstance(leaf, Tensor)
                and leaf.dim() > 0
                and position not in known
                and leaf.shape[0] not in (1, count)
            ):
                return f"the dimension of {path} that counts the {count} samples is not known"
        return ""

    def check(self, item: Item, origin: str, batch_size: int | None = None) -> None:
        """Reject an item whose tensors differ in the number of samples. ``batch_size``: the requested number.

        Raises: ModelFileError with all shapes.
        """
        if not self.known:
            check_samples_first(item, origin, batch_size)
            return
        if self.is_whole:
            return
        leaves, count, named = pytree.tree_leaves(item), self.num_samples(item), list(paths(item))
        problem = next(
            (f"a list has {len(n)} samples, and others have {count}" for n in self._lists(item) if len(n) != count), ""
        )
        problem = problem or self._unknown(item, count)
        for position, dimension in self.of(item).items():
            entries = _entries(leaves[position], dimension)
            if entries != count:
                path = named[position][0]
                problem = f"{path} has {entries} samples in dimension {dimension}, and others have {count}"
                break
        if not problem and batch_size is not None and count > batch_size:
            problem = f"{batch_size} samples were requested, and it has {count}"
        if problem:
            raise ModelFileError(
                f"{origin} returned a batch that cannot be cut: {problem} ({shapes(item)})", remedy=REMEDY
            )


@functools.lru_cache(maxsize=256)
def _leading_paths(structure: pytree.TreeSpec, pair: bool) -> Sequence[Sequence[str]]:
    """Return, by position of a leaf, its path and those of the containers around it, the longest first."""
    empty = pytree.tree_unflatten([0] * structure.num_leaves, structure)
    keyed, _ = pytree.tree_flatten_with_path(empty)
    return [[path_text(keys[:count], pair) for count in range(len(keys), -1, -1)] for keys, _ in keyed]


def _no_such_dimension(item: Item, position: int, dimension: int) -> ModelFileError:
    path, leaf = list(paths(item))[position]
    return ModelFileError(
        f"batch_dim is {dimension} for {path}, which has {counted(leaf.dim(), 'dimension')} ({shapes(item)})",
        remedy="give every tensor its own dimension, such as batch_dim = (1, 0) for inputs and target; None for a "
        "tensor that has none",
    )


def _entries(leaf: Tensor, dimension: int) -> int:
    return int(leaf.shape[dimension])


def check_samples_first(item: Item, origin: str, batch_size: int | None = None) -> None:
    """Reject an item whose tensors differ in dimension 0. ``batch_size``: the requested number of samples.

    Raises: ModelFileError with all shapes.
    """
    count = BatchDimensions().num_samples(item)
    leaves = [leaf for leaf in pytree.tree_leaves(item) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    sized = [leaf for leaf in leaves if leaf.shape[0] != 1 or count == 1]  # 1 broadcasts
    problem = ""
    if len(sized) > 1 and all(leaf.shape[0] != count for leaf in sized[1:]):
        problem = "its tensors differ in dimension 0"
    elif isinstance(item, tuple):
        targets = [leaf for leaf in pytree.tree_leaves(item[1]) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        if targets and all(leaf.shape[0] != count for leaf in targets):
            problem = "the target's dimension 0 differs from the inputs'"
    if not problem and batch_size is not None and count > batch_size:
        problem = f"{batch_size} samples were requested, and it has {count}"
    if not problem and batch_size not in (None, count) and all(leaf.shape[1:2] == (batch_size,) for leaf in leaves):
        problem = f"the {batch_size} requested samples are in dimension 1"
    if problem:
        raise ModelFileError(
            f"{origin} returned a batch that is not samples-first: {problem} ({shapes(item)})", remedy=REMEDY
        )


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The size and the number of parts of the minibatches of a training."""

    parts: int = 1  # number of microbatches
    batch_size: int | None = None  # None for the data's own


def split_by(hook: Hook, item: Item, parts: int) -> list[Item]:
    """Return the microbatches that the hook returns for a batch: ``parts`` of them, or fewer.

    Raises: ModelFileError if the hook fails, or returns anything else.
    """
    microbatches = hook(item, parts)
    problem = ""
    if not isinstance(microbatches, (list, tuple)):
        problem = f"returned {with_article(type(microbatches).__name__)}"
    elif not 1 <= len(microbatches) <= parts:
        problem = f"returned {counted(len(microbatches), 'batch')}, and {parts} were requested"
    if problem:
        raise ModelFileError(
            f"{hook.label} {problem}",
            where=hook.place,
            remedy="return a list of `parts` batches, each structured like a batch of the data",
        )
    return [normalised(microbatch, f"{hook.label}, part {number}") for number, microbatch in enumerate(microbatches)]

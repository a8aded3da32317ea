"""What to say when the loss of a batch is missing or fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopipe.workload.batches.items import COMPARE_SHAPES, CORRECT, UNRELATED, Item, remedy_of, shape_of

_OF_FLOATS = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)
_FLATTENED = "return F.cross_entropy(output.flatten(0, -2), target.flatten())"
_MAX_LEAVES = 4  # of an output, in a message


def described(value: Any) -> str:
    """Return the shapes of an output or a target: ``float32[8, 3]``, ``{'x': int64[8]}``, ``None``."""
    if isinstance(value, Tensor):
        return shape_of(value)
    leaves = pytree.tree_flatten_with_path(value)[0]
    tensors = [f"{pytree.keystr(path)}: {shape_of(leaf)}" for path, leaf in leaves if isinstance(leaf, Tensor)]
    shown = ", ".join(tensors[:_MAX_LEAVES]) + (", ..." if len(tensors) > _MAX_LEAVES else "")
    kind = "" if value is None else type(value).__name__
    return f"{kind}({shown})" if tensors else kind or "None"


def has_target(item: Item) -> bool:
    """Return whether a batch has a target apart from the inputs."""
    return not isinstance(item, Mapping) and item[1] is not None


def lacks_target(error: Exception, item: Item) -> bool:
    """Return whether a loss failed because the batch has no target: it got None, or the dict that is the batch."""
    return not has_target(item) and ("dict" if isinstance(item, Mapping) else "None") in str(error)


def target_for(output: Any, function: Any, *, synthetic: bool) -> str:
    """Return how to give a target that the loss ``function`` takes with this output. ``synthetic``: with --input."""
    if not synthetic:
        return "let data give (inputs, target)"
    sizes = [int(size) for size in output.shape] if isinstance(output, Tensor) else [32, 10]
    if isinstance(function, _OF_FLOATS) or len(sizes) < 2:
        return f'add --input "target:f32{_written(sizes)}"'
    return f'add --input "target:i64{_written(sizes[:-1])}<{sizes[-1]}>"'


def remedy(error: Exception, output: Any, lacks: bool, function: Any, *, synthetic: bool) -> str:
    """Return the remedy for a loss ``function`` that failed on an output. ``lacks``: it got no target."""
    classes_last = isinstance(function, nn.CrossEntropyLoss) and isinstance(output, Tensor) and output.dim() > 2
    flattened = f"CrossEntropyLoss takes the classes in dimension 1: define loss(output, target): {_FLATTENED}"
    if lacks:
        added = f"the batch has no target: {target_for(output, function, synthetic=synthetic)}"
        return f"{added}; {flattened}" if classes_last else added
    if isinstance(error, UNRELATED):
        return CORRECT
    if remedy_of(error) != COMPARE_SHAPES:
        return remedy_of(error)
    return flattened if classes_last else "compare the shapes of output and target with what the loss takes"


def pair_of(keys: Sequence[str], arguments: Sequence[str]) -> str:
    """Return the pair that data should give instead of a dict with keys that the forward does not take."""
    inputs = [key for key in keys if key in arguments] or list(keys[:1])
    others = [key for key in keys if key not in inputs]
    return f"({_items(inputs)}, {_items(others)})"


def _items(keys: Sequence[str]) -> str:
    read = ", ".join(f'batch["{key}"]' for key in keys)
    return read if len(keys) == 1 else f"({read})"


def _written(sizes: Sequence[int]) -> str:
    return f"[{','.join(str(size) for size in sizes)}]"


__all__ = ["described", "has_target", "lacks_target", "pair_of", "remedy", "target_for"]

"""Make gradients depend only on samples and weights, in order to compare a batch with its microbatches.

Random operations give every sample the same numbers, layers with batch statistics use those of the complete batch, and
the weights are moved away from their initial values: the loss of a new classifier is near the logarithm of the number
of its classes, however it is averaged. Everything is restored bit for bit. The gradients of placeholders are folded.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from autopipe import sparse
from autopipe.draws import Draws, flat_checkpoints, is_random
from autopipe.ir.graph import Graph
from autopipe.trace.record.model_snapshot import left_as_it_was
from autopipe.workload import Item, Workload
from autopipe.workload.batches.layouts import copied_item
from autopipe.workload.model.placeholders import is_placeholder

_COARSE = (torch.bfloat16, torch.float16)
_AWAY = 0.1  # shift of the weights, relative to a tensor's root mean square
_SMALL = 0.02  # used in place of the root mean square of a tensor of zeros
_PATTERN = 4093  # length; a prime number, so that no two rows of a weight are equal
_NORMAL = 0.37  # common result of every normal draw
_WIDTH = 4093  # numbers of a folded gradient; a prime number, so that no two rows of a weight fall on the same ones


class SameDraws(Draws):  # type: ignore[no-untyped-call]  # torch has no annotation for its __init_subclass__
    """While active, a random operation gives every element the same number, for any batch; dropout is disabled."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_random(func, args, kwargs):
            return func(*args, **kwargs)
        name = str(func._schema.name)
        if "native_dropout" in name:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        args, kwargs, dropped = _undropped(func, args, kwargs)
        if dropped:
            return func(*args, **kwargs)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.numel():
                _level(tensor, name)
        return result


def _undropped(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return the arguments of a fused call without its dropout, and whether it had dropout."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            if index < len(args):
                return (*args[:index], 0.0, *args[index + 1 :]), kwargs, True
            return args, {**kwargs, argument.name: 0.0}, True
    return args, kwargs, False


def _level(tensor: Tensor, name: str) -> None:
    """Set all elements of a random result to one value. A permutation becomes the identity."""
    if "randperm" in name:
        tensor.copy_(torch.arange(tensor.numel(), device=tensor.device))
    elif "bernoulli" in name:
        tensor.fill_(1)
    elif "randn" in name or "normal" in name:
        tensor.fill_(_NORMAL)
    else:
        tensor.copy_(tensor.flatten()[0].clone())


@contextlib.contextmanager
def steady(workload: Workload, model: nn.Module, item: Item, *, as_it_is: bool = False) -> Iterator[None]:
    """Make the gradient of a batch comparable with that of its parts.

    ``as_it_is``: keep weights and batch statistics unchanged; the model is still restored.
    """
    data = [(parameter, parameter.data) for parameter in model.parameters()]
    with left_as_it_was(model):
        try:
            if not as_it_is:
                _move(model)
                _fix_statistics(workload, model, item)
            yield
        finally:
            for parameter, before in data:
                parameter.data = before


def _move(model: nn.Module) -> None:
    """Move the weights by a repeated pattern: a random number for each weight would take longer than a forward.

    What is trained is a real or a complex tensor. Placeholders have random numbers.
    """
    pattern = torch.randn(_PATTERN, generator=torch.Generator().manual_seed(0))
    for parameter in model.parameters():
        if not parameter.requires_grad or is_placeholder(parameter):
            continue
        now = parameter.data
        wide = torch.complex128 if now.is_complex() else torch.float64  # where squares do not overflow
        size = float(torch.linalg.vector_norm(now, dtype=wide)) / math.sqrt(now.numel()) if now.numel() else 0.0
        noise = pattern.to(now.device, now.dtype) * (_AWAY * size if size else _SMALL)
        parameter.data = moved = now.clone()
        if moved.is_contiguous():
            flat, whole = moved.view(-1), now.numel() // _PATTERN * _PATTERN
            flat[:whole].view(-1, _PATTERN).add_(noise)
            flat[whole:].add_(noise[: now.numel() - whole])
        else:
            moved.add_(noise.repeat(now.numel() // _PATTERN + 1)[: now.numel()].view(now.shape))


def _fix_statistics(workload: Workload, model: nn.Module, item: Item) -> None:
    """Make layers with batch statistics use those of ``item`` for every part of it."""
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, _NormBase) and layer.training and layer.track_running_stats
    ]
    if not layers:
        return
    for layer in layers:
        layer.momentum = 1.0
    with torch.no_grad(), flat_checkpoints(), SameDraws(workload.spec.seed, 0, 0):
        workload.loss(model, copied_item(item))
    for layer in layers:
        layer.training = False


def folded(gradient: Tensor) -> Tensor:
    """Return sums of a gradient: row by row of 4,093 elements, each row with a random sign. It is linear.

    A difference between two gradients shows in the sums as large, relative to them, as in the elements, but for a
    factor near 1 (the count sketch of Charikar, Chen and Farach-Colton, 2002, section 3).
    """
    flat = (gradient.to_dense() if gradient.layout is not torch.strided else gradient).flatten()
    flat = flat if flat.dtype in (torch.float64, torch.complex64, torch.complex128) else flat.float()
    num_rows = flat.numel() // _WIDTH
    sums = flat[num_rows * _WIDTH :]
    if not num_rows:
        return sums.clone()
    signs = _signs(num_rows).to(flat)
    total = signs @ flat[: num_rows * _WIDTH].view(num_rows, _WIDTH)
    total[: sums.numel()] += sums
    return total


@functools.lru_cache(maxsize=64)
def _signs(count: int) -> Tensor:
    return torch.randint(2, (count,), generator=torch.Generator().manual_seed(0)) * 2 - 1


class Gradients:
    """Collects what backwards within ``with`` add to the gradients of a model, which has none before and after.

    The gradient of a placeholder is folded and freed as soon as it is complete.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._folded: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Gradients:
        for parameter in self._model.parameters():
            parameter.grad = None
            if is_placeholder(parameter) and parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._fold)  # type: ignore[no-untyped-call]
                self._handles.append(handle)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _fold(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            sums = folded(parameter.grad)
            before = self._folded.get(id(parameter))
            self._folded[id(parameter)] = sums if before is None else before + sums
            parameter.grad = None

    def taken(self) -> dict[str, Tensor | None]:
        """Return the gradient of each parameter by its name, and remove it from the parameter."""
        gradients: dict[str, Tensor | None] = {}
        for name, parameter in self._model.named_parameters():
            gradients[name] = self._folded.get(id(parameter)) if is_placeholder(parameter) else parameter.grad
            parameter.grad = None
        return gradients


def gradients_of(
    workload: Workload, model: nn.Module, parts: Sequence[Item], factors: Sequence[float]
) -> dict[str, Tensor]:
    """Return the gradients of the weighted sum of the parts' losses. A weight that the loss returns has priority."""
    weights = 0.0
    with Gradients(model) as gradients:
        for part, factor in zip(parts, factors, strict=True):
            with flat_checkpoints(), SameDraws(workload.spec.seed, 0, 0):
                loss, weight = workload.loss(model, copied_item(part))
            weights += 0.0 if weight is None else float(weight.detach())
            if loss.requires_grad and (weight is not None or factor):
                torch.autograd.backward(loss * (factor if weight is None else weight.detach()))
    return {
        name: sparse.wide(gradient.detach()).cpu() / (weights or 1.0)
        for name, gradient in gradients.taken().items()
        if gradient is not None
    }


def difference(whole: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> float | None:
    """Return the difference of two gradients relative to the first, or None if it is not a number."""
    size = apart = 0.0
    for name in {**whole, **parts}:
        one, other = whole.get(name, torch.zeros(())), parts.get(name, torch.zeros(()))
        size += float(one.abs().pow(2).sum())
        apart += float((one - other).abs().pow(2).sum())
    if not math.isfinite(size) or not math.isfinite(apart) or not size:
        return None
    return math.sqrt(apart / size)


def precision_of(workload: Workload, model: nn.Module, graph: Graph) -> float:
    """Return the machine epsilon of the coarsest type that a model computes in, including autocast regions."""
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    types |= {"bf16": {torch.bfloat16}, "fp16": {torch.float16}}.get(workload.spec.precision, set())
    dtypes = {node.spec.dtype for node in graph.nodes if node.spec is not None}
    types |= {kind for kind in _COARSE if str(kind).removeprefix("torch.") in dtypes}
    return max((torch.finfo(kind).eps for kind in types), default=0.0)


class _NothingCoarse(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no annotation for it
    """While active, an operation with a bfloat16 or float16 result is an error."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) and leaf.dtype in _COARSE for leaf in pytree.tree_leaves(result)):
            raise TypeError(f"{func} computes in a coarse type")
        return result


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Convert the bfloat16 and float16 weights and buffers of a model to float32 within the block.

    Raises: TypeError if the model still computes in one of these types: autocast, or a conversion in its forward.
    """
    parameters = [(parameter, parameter.data) for parameter in model.parameters() if parameter.dtype in _COARSE]
    buffers = [
        (module._buffers, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.dtype in _COARSE
    ]
    try:
        for parameter, data in parameters:
            parameter.grad = None
            parameter.data = data.float()
        for registry, name, buffer in buffers:
            registry[name] = buffer.float()
        with _NothingCoarse():  # type: ignore[no-untyped-call]  # torch has no annotation for it
            yield
    finally:
        for parameter, data in parameters:
            parameter.grad = None
            parameter.data = data
        for registry, name, buffer in buffers:
            registry[name] = buffer


def item_in_float32(item: Item) -> Item:
    """Return a batch with its bfloat16 and float16 tensors in float32."""
    wide: Item = pytree.tree_map_only(Tensor, lambda leaf: leaf.float() if leaf.dtype in _COARSE else leaf, item)
    return wide

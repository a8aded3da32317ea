"""Prove a captured graph, and that microbatches add up to their batch, with one run of the model and one of the graph.

The model computes a batch and its gradients, the graph the parts of the batch. Both use the same weights, moved from
their initial values, and every sample has the random numbers of the whole batch. If the loss and every gradient of the
batch are the weighted sums of the parts', the graph is the model, at two sizes, and no sample depends on another.
If they are not, one of the two is wrong, or this comparison does not apply: more runs must tell.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopipe.devices import reraise_failure_of_device
from autopipe.draws import Draws, flat_checkpoints, is_random
from autopipe.trace.graph.describe import GUARD
from autopipe.trace.graph.replay import replay
from autopipe.trace.loss.coupling import shares_of
from autopipe.trace.loss.steady import precision_of, steady
from autopipe.trace.record.model_snapshot import left_as_it_was
from autopipe.trace.result import Capture
from autopipe.trace.verify import Forward, compare, largest_of, run_once
from autopipe.workload import Item, Workload
from autopipe.workload.batches.layouts import copied_item

logger = logging.getLogger(__name__)

# the draws whose numbers do not depend on the values of a tensor
_CUT = {"bernoulli_", "uniform_", "normal_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_"}
_CUT |= {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "native_dropout"}


class NotCutError(Exception):
    """A draw of a batch that has no parts for the samples."""


@dataclass(frozen=True, slots=True)
class _Draw:
    """A draw of the whole batch."""

    func: Any
    args: tuple[Any, ...]  # with tensors on the meta device
    kwargs: dict[str, Any]


class _WholeDraws(Draws):  # type: ignore[no-untyped-call]  # torch has no annotation for its __init_subclass__
    """Notes every draw."""

    def __init__(self, where: tuple[int, int, int], draws: list[_Draw]) -> None:
        """``draws``: the list to which they are added."""
        super().__init__(*where)
        self.draws = draws

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_random(func, args, kwargs):
            self.draws.append(_Draw(func, *pytree.tree_map_only(Tensor, _described, (args, kwargs or {}))))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _described(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class _PartDraws(Draws):  # type: ignore[no-untyped-call]  # as above
    """Gives the samples of a part the numbers that they have in the whole batch."""

    def __init__(self, where: tuple[int, int, int], first: int, draws: list[_Draw], start: int, total: int) -> None:
        """``first``: the position of the first draw. ``start``: the first sample of the part, of ``total`` samples."""
        super().__init__(*where, first=first)
        self.draws, self.start, self.total = draws, start, total

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not is_random(func, args, kwargs):
            return func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        draw = self.draws[self.position] if self.position < len(self.draws) else None
        if draw is None or draw.func is not func:
            raise NotCutError(f"the graph draws {name} at position {self.position}, and the model does not")
        if name not in _CUT or any(isinstance(value, Tensor) for value in args[1:]):
            raise NotCutError(f"{name} draws numbers that are not those of single samples")
        part = func(*args, **(kwargs or {}))
        device = pytree.tree_leaves(part)[0].device
        given = pytree.tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device=device), draw.args)
        whole = super().__torch_dispatch__(func, types, given, draw.kwargs)
        if name == "native_dropout":
            mask = self._of_part(whole[1], args[0].shape)
            return args[0] * mask / (1 - args[1]), mask.clone()
        return part.copy_(self._of_part(whole, part.shape))

    def _of_part(self, whole: Tensor, shape: torch.Size) -> Tensor:
        if whole.dim() != len(shape):
            raise NotCutError(f"a draw of {tuple(whole.shape)} numbers for the batch, and {tuple(shape)} for a part")
        for dimension, (size, wanted) in enumerate(zip(whole.shape, shape, strict=True)):
            if size != wanted:
                whole = whole.narrow(dimension, self.start * size // self.total, wanted)
        return whole


def num_agreeing(workload: Workload, model: nn.Module, capture: Capture, batches: Sequence[tuple[Item, bool]]) -> int:
    """Return for how many batches, up to the first other one, the graph on the parts is the model on the batch.

    ``batches``: each with whether its gradients are compared, and not only its loss. The model is restored. Batches to
    which the comparison does not apply do not agree: other runs then tell why. Memory: two gradients per parameter, and
    the weights twice.
    """
    number = 0
    if not _applies(workload, model, capture):
        return number
    try:
        with steady(workload, model, batches[0][0]):
            for item, gradients in batches:
                if not _agrees(workload, model, capture, item, gradients=gradients):
                    break
                number += 1
    except Exception as error:
        reraise_failure_of_device(error)
        logger.info("the graph on the parts of a batch is not the model on the batch, or cannot be: %s", error)
    return number


def _agrees(workload: Workload, model: nn.Module, capture: Capture, item: Item, *, gradients: bool) -> bool:
    """Compare one batch. Raises: any error if it cannot be compared, or its values differ."""
    where, total = (workload.spec.seed + 1, 0, 0), workload.num_samples(item)
    parts = workload.split(item, 2)
    shares = shares_of(workload, capture.divisor, item, parts)
    if len(parts) < 2 or shares.disagreement:
        return False
    draws: list[_Draw] = []

    def model_on_batch(batch: Item, where: tuple[int, int, int]) -> Forward:
        with flat_checkpoints(), _WholeDraws(where, draws):
            loss, weight = workload.loss(model, batch)
        return Forward([loss], weight, len(draws))

    def graph_on_parts(_: Item, where: tuple[int, int, int]) -> Forward:
        start, losses, weights = 0, list[Tensor](), list[Tensor]()
        for part, factor in zip(parts, shares.factors, strict=True):
            drawing = functools.partial(_drawing, draws, start, total)
            loss, *weight = replay(capture.module, workload.leaves(copied_item(part)), where, drawing)
            weights += [own.detach() for own in weight]
            losses.append(loss * (weights[-1] if weight else factor))
            start += workload.num_samples(part)
        if not weights:
            return Forward(losses, None, len(draws))
        whole_weight = torch.stack(weights).sum()
        return Forward([loss / whole_weight for loss in losses], whole_weight, len(draws))

    with left_as_it_was(model), torch.set_grad_enabled(gradients):
        wanted = run_once(model, model_on_batch, item, where, "the model failed on a batch")
        actual = run_once(model, graph_on_parts, item, where, "the graph failed on its parts")
        buffers = {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
        for name, value in wanted.values.items():
            other = actual.values[name]
            if name in buffers:  # the graph writes to no buffer, and neither may the model
                if not all(after is not None and torch.equal(after, buffers[name]) for after in (value, other)):
                    return False
            elif value is not None and not math.isfinite(largest_of(value)):
                return False  # NaN equals NaN
            compare(name, value, other, f"batch of {total} and its parts", "")
    # every draw has a position of its own, in order
    positions = [
        position
        for node in capture.module.graph.nodes
        for first, count in [node.meta.get("random", (0, 0))]
        for position in range(first, first + count)
    ]
    return positions == list(range(len(draws)))


def _applies(workload: Workload, model: nn.Module, capture: Capture) -> bool:
    """Return whether a graph can be compared on parts, and what it computes is fine enough for their sum."""
    nodes = capture.graph.nodes
    return (
        (capture.divisor is None or len(capture.divisor.outputs) == 1)
        and not any(node.opaque or node.buffers_written or node.target == GUARD for node in nodes)
        and precision_of(workload, model, capture.graph) <= torch.finfo(torch.float32).eps
    )


@contextlib.contextmanager
def _drawing(
    draws: list[_Draw], start: int, total: int, where: tuple[int, int, int], position: int, count: int
) -> Iterator[None]:
    """Give one call of the graph, which draws ``count`` times, the numbers of its samples."""
    with _PartDraws(where, position, draws, start, total) as drawn:
        yield
    if drawn.position != position + count:
        raise NotCutError(f"a call draws {drawn.position - position} times, and {count} times while it is recorded")

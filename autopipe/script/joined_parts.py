"""What ``--num-microbatches`` computes, in one process: calls of the model on the parts of a batch, joined.

Each part has its own cache of weights that autocast has cast. With replicas, the gradients of the parts of one replica
are added first, then those sums, the last replica's first.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopipe.script.batch_samples import cut
from autopipe.script.codec import as_it_arrives
from autopipe.script.rank_order import RankOrder

_backward = torch.autograd.backward  # torch's own, also where a script's is another one


def call_in_parts(model: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any, count: int, replicas: int) -> Any:
    """Call a model on each part, in order, and join. ``replicas``: of the model, each with its share of the parts."""
    parts = cut(args, kwargs, count).parts
    order = RankOrder(replicas, 1)
    outputs: list[Any] = []
    for replica, share in itertools.groupby(range(len(parts)), lambda part: order.replica_of_part(part, len(parts))):
        own = [parts[part] for part in share]
        if replicas == 1:
            outputs += _called(call, own)
        else:
            outputs += _by_replica(model, call, own, is_last=replica == order.last_replica)
    return _joined(outputs)


def _called(call: Callable[..., Any], parts: list[tuple[Any, Any]]) -> list[Any]:
    outputs = []
    for part in parts:
        torch.clear_autocast_cache()
        # ranks have copies, and kernels may round differently over memory that begins elsewhere
        args, kwargs = pytree.tree_map_only(Tensor, as_it_arrives, part)
        outputs.append(call(*args, **kwargs))
    torch.clear_autocast_cache()
    return outputs


def _joined(outputs: list[Any]) -> Any:
    """Return one output for the outputs of parts: tensors joined along dimension 0, other values of the first part."""
    columns = zip(*(pytree.tree_leaves(output) for output in outputs), strict=True)
    values = [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return pytree.tree_unflatten(values, pytree.tree_structure(outputs[0]))


def _by_replica(model: nn.Module, call: Callable[..., Any], parts: list[Any], *, is_last: bool) -> list[Any]:
    """Return the outputs of the parts of a replica. Only the last replica keeps what it writes to buffers."""
    forms: list[Any] = []

    def compute() -> list[Any]:
        with contextlib.nullcontext() if is_last else _buffers_copied(model):
            leaves, form = pytree.tree_flatten(_called(call, parts))
        forms.append((form, leaves))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    tensors = iter(_Replica.apply(compute, *model.parameters()))  # type: ignore[no-untyped-call]
    ((form, leaves),) = forms
    outputs: list[Any] = pytree.tree_unflatten(
        [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form
    )
    return outputs


@contextlib.contextmanager
def _buffers_copied(model: nn.Module) -> Iterator[None]:
    """Give a model copies of its buffers inside."""
    copies = {id(buffer): buffer.clone() for buffer in model.buffers()}
    own = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    for registry, buffers in own:
        registry.update({name: copies[id(buffer)] for name, buffer in buffers.items() if buffer is not None})
    try:
        yield
    finally:
        for registry, buffers in own:
            registry.clear()
            registry.update(buffers)


class _Replica(torch.autograd.Function):
    """What a replica computes. Its backward runs as one, and returns one gradient of each parameter."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], list[Tensor]], *parameters: Tensor) -> Any:
        with torch.enable_grad():
            ctx.outputs = compute()
        ctx.parameters = parameters
        ctx.set_materialize_grads(False)
        results = [output.detach() for output in ctx.outputs]
        fixed = [result for result, output in zip(results, ctx.outputs, strict=True) if not output.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        before = [parameter.grad for parameter in ctx.parameters]
        for parameter in ctx.parameters:
            parameter.grad = None
        pairs = [(output, g) for output, g in zip(ctx.outputs, gradients, strict=True) if g is not None]
        _backward([output for output, _ in pairs], [g for _, g in pairs], retain_graph=True)
        own = [parameter.grad for parameter in ctx.parameters]
        for parameter, gradient in zip(ctx.parameters, before, strict=True):
            parameter.grad = gradient
        return None, *own

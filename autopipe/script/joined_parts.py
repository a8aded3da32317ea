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
    for args, kwargs in parts:
        torch.clear_autocast_cache()
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
    parameters = list(model.parameters())
    own = [nn.Parameter(p.data, requires_grad=p.requires_grad) for p in parameters]
    values: dict[int, Tensor] = dict(zip(map(id, parameters), own, strict=True))
    if not is_last:
        values |= {id(buffer): buffer.clone() for buffer in model.buffers()}
    forms: list[Any] = []

    def compute() -> list[Any]:
        with _exchanged(model, values):
            leaves, form = pytree.tree_flatten(_called(call, parts))
        forms.append((form, leaves))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    tensors = iter(_Replica.apply(compute, own, *parameters))  # type: ignore[no-untyped-call]
    ((form, leaves),) = forms
    outputs: list[Any] = pytree.tree_unflatten(
        [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form
    )
    return outputs


@contextlib.contextmanager
def _exchanged(model: nn.Module, values: dict[int, Tensor]) -> Iterator[None]:
    """Give a model other parameters and buffers inside. ``values``: by the ``id`` of its own."""
    places: list[tuple[Any, Any, Any]] = []  # container, key, its own tensor
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            places += [(tensors, name, tensor) for name, tensor in tensors.items() if id(tensor) in values]
        weights = vars(module).get("_flat_weights", [])  # of torch's recurrent layers
        places += [(weights, place, tensor) for place, tensor in enumerate(weights) if id(tensor) in values]
    for container, key, tensor in places:
        container[key] = values[id(tensor)]
    try:
        yield
    finally:
        for container, key, tensor in places:
            container[key] = tensor


class _Replica(torch.autograd.Function):
    """What a replica computes. Its backward runs as one, and returns one gradient of each parameter."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], list[Tensor]], own: list[Tensor], *parameters: Tensor) -> Any:
        with torch.enable_grad():
            ctx.outputs = compute()
        ctx.own = own
        ctx.set_materialize_grads(False)
        results = [output.detach() for output in ctx.outputs]
        fixed = [result for result, output in zip(results, ctx.outputs, strict=True) if not output.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        for parameter in ctx.own:
            parameter.grad = None
        pairs = [(output, g) for output, g in zip(ctx.outputs, gradients, strict=True) if g is not None]
        _backward([output for output, _ in pairs], [g for _, g in pairs], retain_graph=True)
        return None, None, *(parameter.grad for parameter in ctx.own)

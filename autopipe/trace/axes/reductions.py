"""Sums, means, softmax and normalization: over which dimensions, and which of them can be divided."""

from __future__ import annotations

from torch import nn

from autopipe.ir.teams.axes import ADDED
from autopipe.trace.axes.call import Call, Parts, rule
from autopipe.trace.axes.elementwise import elementwise
from autopipe.trace.axes.leaves import Dims, NoRuleError


def _reduced(call: Call, dims: Dims, over: list[int]) -> Dims:
    if call.argument(2, "keepdim", False):
        return [[] if at in over else dimension for at, dimension in enumerate(dims)]
    return [dimension for at, dimension in enumerate(dims) if at not in over]


@rule("sum")
def total(call: Call) -> Dims:
    """A sum may be divided."""
    dims = call.operand(0)
    over = call.dimensions(1, "dim", dims)
    for at in over:
        call.adds(dims[at], ADDED)
    return _reduced(call, dims, over)


@rule("mean", "amax", "amin", "all", "any", "var", "std", "prod", "logsumexp", "norm")
def reduced(call: Call) -> Dims:
    """Other reductions: the dimensions stay whole."""
    dims = call.operand(0)
    name = call.node.target if isinstance(call.node.target, str) else call.node.target.__name__
    if name in ("var", "std", "norm", "any", "all", "prod", "logsumexp") and call.node.args[1:]:
        raise NoRuleError("its arguments have another order")
    over = call.dimensions(1, "dim", dims)
    for at in over:
        call.whole(dims[at], f"{name} over it")
    return _reduced(call, dims, over)


@rule("max", "min")
def extremes(call: Call) -> Dims | Parts:
    """Of two tensors: element by element. Of one: over a dimension, as values and indices."""
    if len(call.node.all_input_nodes) == 2:
        return elementwise(call)
    dims = call.operand(0)
    at = call.dimension(1, "dim", dims)
    call.whole(dims[at], f"{_name(call)} over it")
    return (_reduced(call, dims, [at]),) * 2


@rule("softmax", "cumsum", "softmin", "logcumsumexp", nn.Softmax)
def along(call: Call) -> Dims:
    """The result has the same shape, and each element depends on the others along one dimension."""
    dims = call.operand(0)
    name = type(call.module).__name__ if call.module is not None else _name(call)
    dim = getattr(call.module, "dim", None) if call.module is not None else call.number(1, "dim")
    if type(dim) is not int:
        raise NoRuleError("its dimension is not given")
    call.whole(dims[dim], f"{name.lower()} over it")
    return dims


def _name(call: Call) -> str:
    return call.node.target if isinstance(call.node.target, str) else str(call.node.target.__name__)


def _normalized(call: Call, dims: Dims, count: int, weights: list[Dims | None]) -> Dims:
    for at in range(1, count + 1):
        call.whole(dims[-at], "normalized over")
        for weight in weights:
            if weight is not None and weight[-at]:
                call.leaves.unify(dims[-at], weight[-at])
    return dims


@rule(nn.LayerNorm, nn.RMSNorm)
def norm_module(call: Call) -> Dims:
    """Normalize over the last dimensions."""
    assert isinstance(call.module, (nn.LayerNorm, nn.RMSNorm))
    weights = [call.state("weight"), call.state("bias")]
    return _normalized(call, call.operand(0), len(call.module.normalized_shape), weights)


@rule("layer_norm", "rms_norm")
def norm(call: Call) -> Dims:
    """Normalize over the last dimensions."""
    shape = call.argument(1, "normalized_shape")
    if not isinstance(shape, (list, tuple)):
        raise NoRuleError("its shape is not constant")
    weights = [call.optional(2, "weight"), call.optional(3, "bias") if _name(call) == "layer_norm" else None]
    return _normalized(call, call.operand(0), len(shape), weights)

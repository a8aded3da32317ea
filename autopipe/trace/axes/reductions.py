"""Calls that compute each element from those at its place; sums, means, softmax and normalization over dimensions."""

from __future__ import annotations

from torch import nn

from autopipe.ir.teams.axes import ADDED
from autopipe.trace.axes.call import Call, Parts, rule
from autopipe.trace.axes.dimension_factors import Dims, NoRuleError


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
        return _elementwise(call)
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


def _names(text: str) -> list[str]:
    return text.split()


_TWO_SIDED = _names(
    "add sub mul truediv div true_divide divide multiply subtract floordiv floor_divide mod remainder fmod pow neg "
    "negative and_ or_ xor invert logical_and logical_or logical_xor logical_not eq ne lt le gt ge minimum maximum "
    "where masked_fill addcmul addcdiv lerp atan2 clamp clamp_min clamp_max clip hypot nan_to_num"
)
_ONE_SIDED = _names(
    "abs exp expm1 log log1p log2 sqrt rsqrt reciprocal square sin cos tan tanh sigmoid erf sign floor ceil round "
    "relu relu6 gelu silu mish elu selu celu leaky_relu softplus softsign hardtanh hardswish hardsigmoid logsigmoid "
    "tanhshrink threshold dropout isnan isinf isfinite "
    "to float double half bfloat16 bool int long type type_as contiguous clone detach "
    "zeros_like ones_like full_like empty_like requires_grad_"
)
# in place, with the same meaning; ``iadd`` and the like are what ``+=`` records
_IN_PLACE = _names(
    "add_ sub_ mul_ div_ neg_ pow_ exp_ sqrt_ rsqrt_ sigmoid_ tanh_ relu_ silu_ clamp_ clamp_min_ clamp_max_ "
    "masked_fill_ logical_not_ logical_and_ logical_or_ iadd isub imul itruediv ipow iand ior ixor"
)
_MODULES = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Softplus, nn.Softsign,
    nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink, nn.Threshold, nn.Tanh, nn.Sigmoid,
    nn.Dropout, nn.Identity,
)  # fmt: skip


@rule(*_TWO_SIDED, *_ONE_SIDED, *_IN_PLACE, *_MODULES)
def _elementwise(call: Call) -> Dims:
    """Unify the operands. Keywords that are tensors, such as ``out=``, have no rule."""
    if call.node.kwargs.get("out") is not None:
        raise NoRuleError("it writes to out=")
    dims = call.broadcast(call.dims_of(operand) for operand in call.node.all_input_nodes)
    if len(dims) != len(call.shape):
        raise NoRuleError("its result has other dimensions than its operands")
    call.draws_for(dims)
    return dims

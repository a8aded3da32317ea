"""Calls that compute each element from the elements at its place: their operands are unified as they are broadcast."""

from __future__ import annotations

from torch import nn

from autopipe.trace.axes.call import Call, rule
from autopipe.trace.axes.leaves import Dims, NoRuleError


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
def elementwise(call: Call) -> Dims:
    """Unify the operands. Keywords that are tensors, such as ``out=``, have no rule."""
    if call.node.kwargs.get("out") is not None:
        raise NoRuleError("it writes to out=")
    dims = call.broadcast(call.dims_of(operand) for operand in call.node.all_input_nodes)
    if len(dims) != len(call.shape):
        raise NoRuleError("its result has other dimensions than its operands")
    call.draws_for(dims)
    return dims

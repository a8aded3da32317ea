"""Fused attention: heads and groups of heads can be divided; what a softmax or the scores read stays whole."""

from __future__ import annotations

import operator

from torch import fx, nn

from autopipe.ir.teams.axes import MULTIHEAD
from autopipe.trace.axes.call import Call, Parts, rule
from autopipe.trace.axes.leaves import Dimension, Dims, NoRuleError


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Dims:
    """Queries [..., heads, length, width] with keys and values; ``enable_gqa``: heads of keys serve a group each."""
    query, key, value = call.operand(0, "query"), call.operand(1, "key"), call.operand(2, "value")
    mask = call.argument(3, "attn_mask")
    if min(len(query), len(key), len(value)) < 3:
        raise NoRuleError("it has no heads")
    call.leaves.unify(query[-1], key[-1])
    call.leaves.unify(key[-2], value[-2])
    call.whole(query[-1], "the scores of attention add over it")
    call.whole(key[-2], "softmax over it")
    call.whole(query[-2], "a length of attention")
    leading = [query[:-2], key[:-2], value[:-2]]
    if call.node.kwargs.get("enable_gqa"):
        leading = [query[:-2], _grouped(call, query, key), _grouped(call, query, value)]
    if isinstance(mask, fx.Node):
        dims = call.dims_of(mask)
        if dims is None or len(dims) < 2:
            raise NoRuleError("its mask is not a tensor with the shape of scores")
        leading.append(dims[:-2])
        call.broadcast([dims[-2:], [query[-2], key[-2]]])
    heads = call.broadcast(leading)
    call.draws_for(heads)
    return [*heads, query[-2], value[-1]]


def _grouped(call: Call, query: Dims, other: Dims) -> Dims:
    """Return the leading dimensions of keys or values in the order of the query's heads, without their group."""
    heads = call.leaves.flat(query[-3])
    count = call.leaves.length(call.leaves.flat(other[-3]))
    outer, group = call.leaves.take(heads, count)
    call.leaves.unify(outer, other[-3])
    return [*other[:-3], [*outer, *group]]


@rule(nn.MultiheadAttention)
def multihead(call: Call) -> Parts:
    """The module: its projections are (3, heads, width) by inputs, and outputs by (heads, width)."""
    module = call.module
    assert isinstance(module, nn.MultiheadAttention)
    if module.bias_k is not None or module.add_zero_attn:
        raise NoRuleError("it adds keys")
    if not call.node.users:
        raise NoRuleError("its result is not read")
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in call.node.users):
        raise NoRuleError("its weights are read")
    query, key, value = call.operand(0, "query"), call.operand(1, "key"), call.operand(2, "value")
    mask = call.optional(5, "attn_mask")
    if len(query) != 3 or (mask is not None and len(mask) != 2):
        raise NoRuleError("it has no batch, or a mask for each head")
    heads, others = _heads(call, module)
    for dims in (query, key, value, call.optional(3, "key_padding_mask") or [], mask or []):
        others += [leaf for dimension in dims for leaf in dimension]
    out, bias = call.dims_of(module.out_proj.weight), call.dims_of(module.out_proj.bias)
    if out is None or (module.out_proj.bias is not None and bias is None):
        raise NoRuleError("its weights are computed")
    mine, rest = call.leaves.take(call.leaves.flat(out[1]), module.num_heads)
    call.leaves.unify(heads, mine)
    call.whole([*others, *rest, *out[0], *(bias or [[]])[0]], "the inputs and outputs of MultiheadAttention")
    call.adds(heads, MULTIHEAD)
    call.after_the_sum(f"{call.node.target}.out_proj.bias")
    call.draws_for([heads])
    return [*query[:-1], out[0]], None


def _heads(call: Call, module: nn.MultiheadAttention) -> tuple[Dimension, Dimension]:
    """Return the heads of the input projections, and the leaves of their other dimensions."""
    heads: Dimension = []
    others: Dimension = []
    names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
    for name, dims in [(name, call.state(name)) for name in names]:
        if dims is None:
            continue
        rest = call.leaves.flat(dims[0])
        if name.startswith("in_"):
            three, rest = call.leaves.take(rest, 3)
            others += three
        mine, width = call.leaves.take(rest, module.num_heads)
        call.leaves.unify(heads or mine, mine)
        heads = heads or mine
        others += [*width, *(leaf for dimension in dims[1:] for leaf in dimension)]
    return heads, others

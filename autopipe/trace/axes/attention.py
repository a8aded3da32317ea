"""Fused attention: heads and groups of heads can be divided; what a softmax or the scores read stays whole."""

from __future__ import annotations

from torch import fx

from autopipe.trace.axes.call import Call, rule
from autopipe.trace.axes.leaves import Dims, NoRuleError


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

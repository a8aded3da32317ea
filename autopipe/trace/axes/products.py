"""Matrix products: the common dimension is added over. Fused attention: heads and groups of heads can be divided."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

from autopipe.ir.teams.axes import ADDED, ADDED_BEFORE_BIAS, MULTIHEAD
from autopipe.trace.axes.call import Call, Parts, rule
from autopipe.trace.axes.dimension_factors import Dimension, Dims, NoRuleError


def _linear(call: Call, x: Dims, weight: Dims, bias: Dims | None, bias_name: Any) -> Dims:
    """``weight``: [out, in]."""
    if len(weight) != 2 or not x:
        raise NoRuleError("its weight is not a matrix")
    call.leaves.unify(x[-1], weight[1])
    call.adds(weight[1], ADDED if bias is None else ADDED_BEFORE_BIAS)
    if bias is not None:
        call.after_the_sum(bias_name)
        if len(bias) != 1:
            raise NoRuleError("its bias is not a vector")
        if bias[0]:
            call.leaves.unify(weight[0], bias[0])
    return [*x[:-1], weight[0]]


@rule(nn.Linear)
def linear_module(call: Call) -> Dims:
    """``x @ weight.T + bias``."""
    weight = call.state("weight")
    assert weight is not None
    return _linear(call, call.operand(0), weight, call.state("bias"), f"{call.node.target}.bias")


@rule("linear")
def linear(call: Call) -> Dims:
    """``x @ weight.T + bias``."""
    bias = call.argument(2, "bias")
    return _linear(call, call.operand(0), call.operand(1, "weight"), call.optional(2, "bias"), bias)


@rule("addmm")
def addmm(call: Call) -> Dims:
    """``bias + x @ weight``, without factors."""
    if call.node.kwargs.get("beta", 1) != 1 or call.node.kwargs.get("alpha", 1) != 1:
        raise NoRuleError("it scales the product")
    weight = call.operand(2, "mat2")
    if len(weight) != 2:
        raise NoRuleError("its weight is not a matrix")
    return _linear(call, call.operand(1, "mat1"), [weight[1], weight[0]], call.operand(0), call.argument(0, "input"))


@rule("matmul", "bmm", "mm", "baddbmm")
def product(call: Call) -> Dims:
    """Batches of matrices. ``baddbmm``: its scores are added to a value, and stay whole along the common dimension."""
    first = 1 if call.node.target == "baddbmm" or getattr(call.node.target, "__name__", "") == "baddbmm" else 0
    left, right = call.operand(first, "other"), call.operand(first + 1, "other")
    if len(left) < 2 or len(right) < 2:
        raise NoRuleError("it multiplies by a vector")
    call.leaves.unify(left[-1], right[-2])
    if first:
        call.whole(left[-1], "the common dimension of a product that is added to a value")
    else:
        call.adds(left[-1], ADDED)
    dims = [*call.broadcast([left[:-2], right[:-2]]), left[-2], right[-1]]
    return call.broadcast([dims, call.operand(0)]) if first else dims


@rule("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
def grouped_product(call: Call) -> Dims:
    """Rows, sorted by expert, times the matrix of their expert: x [rows, in], weight [experts, in, out]."""
    x, weight = call.operand(0), call.operand(1, "mat_b")
    if len(x) != 2 or len(weight) != 3:
        raise NoRuleError("it has another form than rows times one matrix of each expert")
    if any(isinstance(call.node.kwargs.get(name), fx.Node) for name in ("bias", "out")):
        raise NoRuleError("it adds a bias")
    call.leaves.unify(x[1], weight[1])
    call.adds(weight[1], ADDED)
    call.whole([*x[0], *weight[0]], "rows and experts of a grouped product")
    return [x[0], weight[2]]


@rule("einsum")
def einsum(call: Call) -> Dims:
    """An equation with one letter a dimension, each at most once in an operand."""
    equation, operands = call.node.args[0], call.node.args[1:]
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        raise NoRuleError("its equation is not explicit")
    inputs, _, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    by_letter: dict[str, list[int]] = {}
    if len(terms) != len(operands):
        raise NoRuleError("its equation has another number of operands")
    for term, operand in zip(terms, operands, strict=True):
        dims = call.dims_of(operand)
        if dims is None or len(dims) != len(term) or len(set(term)) < len(term):
            raise NoRuleError("its equation reads a diagonal")
        for letter, dimension in zip(term, dims, strict=True):
            if by_letter.get(letter):
                if dimension:
                    call.leaves.unify(by_letter[letter], dimension)
            else:
                by_letter[letter] = dimension
    for letter, dimension in by_letter.items():
        if letter not in output:
            call.adds(dimension, ADDED)
    return [by_letter[letter] for letter in output]


@rule("scaled_dot_product_attention")
def _attention(call: Call) -> Dims:
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
def _multihead(call: Call) -> Parts:
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

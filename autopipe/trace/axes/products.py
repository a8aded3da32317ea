"""Matrix products: the common dimension is added over."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from autopipe.ir.teams.axes import ADDED, ADDED_BEFORE_BIAS
from autopipe.trace.axes.call import Call, rule
from autopipe.trace.axes.leaves import Dims, NoRuleError


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

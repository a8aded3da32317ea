"""Calls that give the same elements another shape."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, fx, nn

from autopipe.trace.axes.call import Call, Parts, rule, shape_of
from autopipe.trace.axes.dimension_factors import DimensionFactors, Dims, NoRuleError


def reshaped(leaves: DimensionFactors, dims: Dims, shape: tuple[int, ...]) -> Dims:
    """Return the dimensions after a view as ``shape``: leaves are merged and split. Raises: NoRuleError."""
    rest = leaves.flat(leaf for dimension in dims for leaf in dimension)
    result = []
    for size in shape:
        taken, rest = leaves.take(rest, size)
        result.append(taken)
    if rest:
        raise NoRuleError("it changes the number of elements")
    return result


@rule("view", "reshape")
def view(call: Call) -> Dims:
    """A view with literal sizes, of which one may be -1."""
    sizes = call.sizes(1, "size" if call.node.target == "view" else "shape")
    if 0 in call.shape or len(sizes) != len(call.shape):
        raise NoRuleError("it is a view of another dtype, or empty")
    dims = reshaped(call.leaves, call.operand(0), call.shape)
    for (size, path), dimension in zip(sizes, dims, strict=True):
        call.counts(size, path, dimension)
    return dims


@rule("view_as", "reshape_as")
def view_as(call: Call) -> Dims:
    """A view in the shape of another tensor: both carry the same axes."""
    dims, other = reshaped(call.leaves, call.operand(0), call.shape), call.operand(1, "other")
    return call.broadcast([dims, other])


@rule("flatten", nn.Flatten)
def flatten(call: Call) -> Dims:
    """Merge dimensions."""
    return reshaped(call.leaves, call.operand(0), call.shape)


@rule("unflatten", nn.Unflatten)
def unflatten(call: Call) -> Dims:
    """Split one dimension."""
    dims = call.operand(0)
    if call.module is not None:
        result = reshaped(call.leaves, dims, call.shape)
        call.whole((leaf for dimension in result for leaf in dimension), "divided by a module with fixed sizes")
        return result
    at = call.dimension(1, "dim", dims)
    result = reshaped(call.leaves, dims, call.shape)
    for (size, path), dimension in zip(call.sizes(2, "sizes"), result[at:], strict=False):
        call.counts(size, path, dimension)
    return result


@rule("transpose", "swapaxes", "swapdims")
def transpose(call: Call) -> Dims:
    """Exchange two dimensions."""
    dims = list(call.operand(0))
    i, j = call.dimension(1, "dim0", dims), call.dimension(2, "dim1", dims)
    dims[i], dims[j] = dims[j], dims[i]
    return dims


@rule("t")
def transposed_matrix(call: Call) -> Dims:
    """Exchange the two dimensions of a matrix."""
    return call.operand(0)[::-1]


@rule("getattr")
def attribute(call: Call) -> Dims:
    """``x.T`` and ``x.mT``."""
    dims, name = call.operand(0), call.argument(1, "name")
    if name == "mT" or (name == "T" and len(dims) == 2):
        return [*dims[:-2], dims[-1], dims[-2]]
    raise NoRuleError(f"it reads {name}")


@rule("permute")
def permute(call: Call) -> Dims:
    """Reorder the dimensions."""
    dims = call.operand(0)
    order = [number for number, _ in call.sizes(1, "dims")]
    if any(type(number) is not int for number in order):
        raise NoRuleError("its order is not constant")
    return [dims[number] for number in order]


@rule("movedim", "moveaxis")
def movedim(call: Call) -> Dims:
    """Move one dimension."""
    dims = list(call.operand(0))
    source, destination = call.dimension(1, "source", dims), call.dimension(2, "destination", dims)
    dims.insert(destination, dims.pop(source))
    return dims


@rule("unsqueeze")
def unsqueeze(call: Call) -> Dims:
    """Insert a dimension of size 1."""
    dims = list(call.operand(0))
    at = call.number(1, "dim")
    dims.insert(at % (len(dims) + 1), [])
    return dims


@rule("squeeze")
def squeeze(call: Call) -> Dims:
    """Remove dimensions of size 1: those that are named, else all of them."""
    dims = call.operand(0)
    chosen = {*call.dimensions(1, "dim", dims)}
    result = [dimension for at, dimension in enumerate(dims) if at not in chosen or dimension]
    if len(result) != len(call.shape):
        raise NoRuleError("it removes a dimension whose size is known only later")
    return result


@rule("expand", "broadcast_to")
def expand(call: Call) -> Dims:
    """Repeat dimensions of size 1 without a copy: each gets a leaf of its own."""
    dims, shape = call.operand(0), call.shape
    dims = [*([[]] * (len(shape) - len(dims))), *dims]
    result = [have or call.leaves.new(size) for have, size in zip(dims, shape, strict=True)]
    for (size, path), dimension in zip(call.sizes(1, "size"), result, strict=True):
        call.counts(size, path, dimension)
    return result


@rule("expand_as")
def expand_as(call: Call) -> Dims:
    """Repeat dimensions to the shape of another tensor."""
    return call.broadcast([call.operand(0), call.operand(1, "other")])


@rule("repeat_interleave")
def repeat_interleave(call: Call) -> Dims:
    """Repeat each element of a dimension: the repetitions are a leaf inside of it."""
    dims = list(call.operand(0))
    count, at = call.number(1, "repeats"), call.dimension(2, "dim", dims)
    repeated = call.leaves.new(count)
    call.counts(count, call.path(1, "repeats"), repeated)
    dims[at] = [*dims[at], *repeated]
    return dims


@rule("repeat", "tile")
def repeat(call: Call) -> Dims:
    """Repeat dimensions as a whole: the repetitions are a leaf outside of each."""
    dims, counts = call.operand(0), call.sizes(1, "repeats" if call.node.target == "repeat" else "dims")
    if len(counts) < len(dims) or any(type(count) is not int or count < 1 for count, _ in counts):
        raise NoRuleError("its counts are not constant")
    dims = [*([[]] * (len(counts) - len(dims))), *dims]
    result = []
    for (count, path), dimension in zip(counts, dims, strict=True):
        repeated = call.leaves.new(count)
        call.counts(count, path, repeated)
        result.append([*repeated, *dimension])
    return result


@rule("unbind")
def unbind(call: Call) -> Parts:
    """Take a dimension apart."""
    dims = call.operand(0)
    at = call.dimension(1, "dim", dims, 0)
    call.whole(dims[at], "taken apart")
    return (dims[:at] + dims[at + 1 :],) * call.leaves.length(call.leaves.flat(dims[at]))


@rule("split", "split_with_sizes", "chunk", "tensor_split")
def split(call: Call) -> Parts:
    """Cut a dimension into parts: factors if they are equal, else segments."""
    dims, name = call.operand(0), call.node.target if isinstance(call.node.target, str) else call.node.target.__name__
    at = call.dimension(2, "dim", dims, 0)
    dimension = call.leaves.flat(dims[at])
    length, argument = call.leaves.length(dimension), call.argument(1, "chunks" if "chunk" in name else "split_size")
    if argument is None:
        argument = call.argument(1, "split_size_or_sections")
    numbered = name in ("chunk", "tensor_split")
    if type(argument) is int:
        sizes = _equal_parts(length, argument, numbered)
        if len(set(sizes)) == 1:
            first, rest = call.leaves.take(dimension, len(sizes))
            call.whole(first, "taken apart")
            if not numbered:
                call.counts(argument, call.path(1, _keyword(call)), rest)
            return tuple([*dims[:at], rest, *dims[at + 1 :]] for _ in sizes)
        argument = None if numbered else sizes
    if not isinstance(argument, (list, tuple)) or numbered or any(type(size) is not int for size in argument):
        raise NoRuleError("its sizes are not constant")
    parts, start = [], 0
    for index, size in enumerate(argument):
        part = call.leaves.cut(dimension, start, start + size)
        parts.append([*dims[:at], part, *dims[at + 1 :]])
        start += size
        if isinstance(call.argument(1, _keyword(call)), (list, tuple)):
            call.counts(size, (*call.path(1, _keyword(call)), index), part)
        else:
            call.whole(part, "cut into uneven parts")
    return tuple(parts)


def _keyword(call: Call) -> str:
    return next((name for name in ("split_size_or_sections", "split_sizes") if name in call.node.kwargs), "split_size")


def _equal_parts(length: int, argument: int, numbered: bool) -> list[int]:
    each = -(-length // argument) if numbered else argument
    return [min(each, length - start) for start in range(0, length, each)]


@rule("cat", "concat", "concatenate")
def cat(call: Call) -> Dims:
    """Concatenate: the parts are segments of the result."""
    values = call.argument(0, "tensors")
    values = [value for value in values if not _is_nothing(value)] if isinstance(values, (list, tuple)) else []
    operands = [call.dims_of(value) for value in values]
    dims = [operand for operand in operands if operand is not None]
    if not dims or len(dims) < len(operands) or any(len(other) != len(dims[0]) for other in dims):
        raise NoRuleError("it joins what is not a list of tensors")
    at = call.dimension(1, "dim", dims[0], 0)
    result = call.broadcast([[*d[:at], [], *d[at + 1 :]] for d in dims])
    result[at] = call.leaves.joined([d[at] for d in dims])
    return result


def _is_nothing(value: Any) -> bool:
    """Return whether a value is the empty vector, which torch ignores in a concatenation."""
    example = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(example, Tensor) and shape_of(example) == (0,)


@rule("stack")
def stack(call: Call) -> Dims:
    """Concatenate along a new dimension, which stays whole."""
    values = call.argument(0, "tensors")
    dims = [call.dims_of(value) for value in values] if isinstance(values, (list, tuple)) else [None]
    result = call.broadcast(dims)
    if None in dims or len(result) + 1 != len(call.shape):
        raise NoRuleError("it joins what is not a list of tensors")
    at = call.dimension(1, "dim", [*result, []], 0)
    new = call.leaves.new(call.shape[at])
    call.whole(new, "stacked")
    return [*result[:at], new, *result[at:]]


@rule("narrow")
def narrow(call: Call) -> Dims:
    """A slice."""
    dims = list(call.operand(0))
    at, start, length = call.dimension(1, "dim", dims), call.number(2, "start"), call.number(3, "length")
    if start < 0:
        raise NoRuleError("it counts from the end")
    dims[at] = call.leaves.cut(dims[at], start, start + length)
    call.counts(start, call.path(2, "start"), dims[at])
    call.counts(length, call.path(3, "length"), dims[at])
    return dims


@rule("select")
def select(call: Call) -> Dims:
    """One element of a dimension."""
    dims = list(call.operand(0))
    call.whole(dims.pop(call.dimension(1, "dim", dims)), "one element is read")
    return dims


@rule("getitem")
def getitem(call: Call) -> Dims | Parts:
    """``x[...]`` with constant indices; or one of the results of an earlier call."""
    parts, index = call.parts_of(call.node.args[0]), call.node.args[1]
    if parts is not None:
        dims = parts[index] if type(index) is int and -len(parts) <= index < len(parts) else None
        if dims is None:
            raise NoRuleError("it reads a result that is not a tensor")
        return dims
    dims = call.operand(0)
    return _indexed(call, dims, index if isinstance(index, tuple) else (index,), isinstance(index, tuple))


def _indexed(call: Call, dims: Dims, indices: tuple[Any, ...], is_tuple: bool) -> Dims:
    if any(not (i is None or i is Ellipsis or type(i) in (int, slice)) for i in indices):
        return _gathered(call, dims, indices)
    named = sum(index is not None and index is not Ellipsis for index in indices)
    full = indices if Ellipsis in indices else (*indices, Ellipsis)
    result: Dims = []
    rest = list(dims)
    for position, index in enumerate(full):
        path = (1, position) if is_tuple else (1,)
        if index is None:
            result.append([])
        elif index is Ellipsis:
            result += [rest.pop(0) for _ in range(len(dims) - named)]
        elif type(index) is int:
            call.whole(rest.pop(0), "one element is read")
        else:
            result.append(_sliced(call, rest.pop(0), index, path, call.shape[len(result)]))
    return result


def _sliced(call: Call, dimension: list[int], index: slice, path: tuple[int, ...], size: int) -> list[int]:
    if index == slice(None):
        return dimension
    length = call.leaves.length(dimension)
    bounds = (index.start, index.stop, index.step)
    step = index.step
    if type(step) is int and step > 1 and index.stop is None and (index.start or 0) < step and length % step == 0:
        outer, inner = call.leaves.take(call.leaves.flat(dimension), length // step)
        call.whole(inner, "every other element is read")
        return outer
    if any(not (bound is None or type(bound) is int) for bound in bounds) or index.step not in (None, 1):
        call.whole(dimension, "sliced")
        part = call.leaves.new(size)
        call.whole(part, "sliced")
        return part
    start, stop, _ = index.indices(length)
    if start >= stop:
        part = call.leaves.new(0)
        call.whole(part, "sliced")
        return part
    part = call.leaves.cut(dimension, start, stop)
    for at, bound in enumerate((index.start, index.stop)):
        if type(bound) is int and bound < 0:
            call.whole(part, "sliced from the end")
        call.counts(bound, (*path, at), part)
    return part


def _gathered(call: Call, dims: Dims, indices: tuple[Any, ...]) -> Dims:
    """Rows of the first dimension, chosen by one tensor: the other dimensions stay as they are."""
    first = indices[0]
    value = first.meta.get("val") if isinstance(first, fx.Node) else None
    others = all(index is Ellipsis or index == slice(None) for index in indices[1:])
    if not isinstance(value, Tensor) or not others or value.dtype.is_floating_point or value.dtype.is_complex:
        raise NoRuleError("it is indexed by tensors")
    chosen = call.dims_of(first) or []
    call.whole([*dims[0], *(leaf for dimension in chosen for leaf in dimension)], "indexed by a tensor")
    count = len(call.shape) - len(dims) + 1
    rows = call.leaves.fresh(call.shape[:count])
    call.whole((leaf for dimension in rows for leaf in dimension), "indexed by a tensor")
    return [*rows, *dims[1:]]


@rule("zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full")
def filled(call: Call) -> Dims:
    """A new tensor, equal everywhere: its sizes are leaves of their own."""
    name = call.node.target if isinstance(call.node.target, str) else call.node.target.__name__
    if any(not (arg is None or type(arg) in (int, float, bool)) for arg in call.node.args[2:] if "full" in name):
        raise NoRuleError("it is filled with a tensor")
    dims = call.leaves.fresh(call.shape)
    sizes = call.sizes(1 if name.startswith("new_") else 0, "size")
    if len(sizes) != len(dims) or math.prod(call.shape) == 0:
        raise NoRuleError("its sizes are not constant")
    for (size, path), dimension in zip(sizes, dims, strict=True):
        if type(size) is not int:
            call.whole(dimension, "a size of the batch")
        call.counts(size, path, dimension)
    return dims

"""Tables and the loss over a vocabulary: rows of an embedding, and columns of a cross entropy."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from autopipe.ir.teams.axes import CROSS_ENTROPY, LOG_SOFTMAX, LOOKED_UP, PICKED
from autopipe.trace.axes.call import Call, rule
from autopipe.trace.axes.dimension_factors import Dims, NoRuleError


def _looked_up(call: Call, ids: Dims, weight: Dims, *, plain: bool) -> Dims:
    call.whole((leaf for dimension in ids for leaf in dimension), "an index")
    if plain:
        call.adds(weight[0], LOOKED_UP)
    else:
        call.whole(weight[0], "a table with max_norm, scale_grad_by_freq or sparse")
    return [*ids, weight[1]]


@rule(nn.Embedding)
def embedding_module(call: Call) -> Dims:
    """``weight[ids]``."""
    module = call.module
    assert isinstance(module, nn.Embedding)
    weight = call.state("weight")
    assert weight is not None
    plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return _looked_up(call, call.operand(0), weight, plain=plain)


@rule("embedding")
def embedding(call: Call) -> Dims:
    """``weight[ids]``."""
    settings = (call.argument(3, "max_norm"), call.argument(5, "scale_grad_by_freq"), call.argument(6, "sparse"))
    return _looked_up(call, call.operand(0), call.operand(1, "weight"), plain=not any(settings))


def _classes(call: Call, logits: Dims, target: Any) -> int:
    """Return which dimension has the classes, and mark the others. Raises: NoRuleError."""
    value = target.meta.get("val") if isinstance(target, fx.Node) else None
    if not isinstance(value, Tensor) or value.dtype.is_floating_point:
        raise NoRuleError("its targets are not indices of classes")
    at = 1 if len(logits) > 1 else 0
    for other, dimension in enumerate(logits):
        if other != at:
            call.whole(dimension, "a loss over it")
    call.whole((leaf for dimension in call.dims_of(target) or [] for leaf in dimension), "an index")
    return at


def _plain_loss(call: Call, logits: Dims) -> Dims:
    """Return the dimensions of a loss; they stay whole. Raises: NoRuleError for settings without a rule."""
    for name in ("weight", "size_average", "reduce"):
        if call.node.kwargs.get(name) is not None:
            raise NoRuleError(f"it has {name}")
    if call.node.kwargs.get("label_smoothing", 0.0) or len(call.node.args) > 2:
        raise NoRuleError("it has label smoothing or weights")
    if not call.shape:
        return []
    return [dimension for at, dimension in enumerate(logits) if at != (1 if len(logits) > 1 else 0)]


@rule("cross_entropy")
def cross_entropy(call: Call) -> Dims:
    """Logits [samples, classes, ...] and indices."""
    logits = call.operand(0)
    loss = _plain_loss(call, logits)
    call.adds(logits[_classes(call, logits, call.argument(1, "target"))], CROSS_ENTROPY)
    return loss


@rule("nll_loss")
def nll_loss(call: Call) -> Dims:
    """The entries of the targets."""
    logits = call.operand(0)
    loss = _plain_loss(call, logits)
    call.adds(logits[_classes(call, logits, call.argument(1, "target"))], PICKED)
    return loss


@rule("log_softmax", nn.LogSoftmax)
def log_softmax(call: Call) -> Dims:
    """The result carries the classes, too."""
    logits = call.operand(0)
    dim = getattr(call.module, "dim", None) if call.module is not None else call.number(1, "dim")
    if type(dim) is not int:
        raise NoRuleError("its dimension is not given")
    call.adds(logits[dim], LOG_SOFTMAX)
    return logits


@rule(nn.CrossEntropyLoss, nn.NLLLoss)
def loss_module(call: Call) -> Dims:
    """The losses as modules."""
    module = call.module
    assert isinstance(module, (nn.CrossEntropyLoss, nn.NLLLoss))
    smoothing = getattr(module, "label_smoothing", 0.0)
    if module.weight is not None or smoothing:
        raise NoRuleError("it has label smoothing or weights")
    return cross_entropy(call) if isinstance(module, nn.CrossEntropyLoss) else nll_loss(call)

"""Describe recorded calls of torch's loss functions: their reduction, targets, and class weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.nn import functional

_INDEXED = {"cross_entropy", "nll_loss", "cross_entropy_loss", "nll_loss_nd", "nll_loss2d"}
# a mean over elements, equally many for each sample; ctc_loss and batchmean average over the samples
_ELEMENTWISE = {
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "poisson_nll_loss", "gaussian_nll_loss", "kl_div", "hinge_embedding_loss", "margin_ranking_loss",
    "soft_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "multi_margin_loss",
    "cosine_embedding_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss", "ctc_loss",
}  # fmt: skip
_MODULES: dict[type[nn.Module], str] = {
    nn.CrossEntropyLoss: "cross_entropy",
    nn.NLLLoss: "nll_loss",
    nn.MSELoss: "mse_loss",
    nn.L1Loss: "l1_loss",
    nn.SmoothL1Loss: "smooth_l1_loss",
    nn.HuberLoss: "huber_loss",
    nn.BCELoss: "binary_cross_entropy",
    nn.BCEWithLogitsLoss: "binary_cross_entropy_with_logits",
    nn.PoissonNLLLoss: "poisson_nll_loss",
    nn.GaussianNLLLoss: "gaussian_nll_loss",
    nn.KLDivLoss: "kl_div",
    nn.HingeEmbeddingLoss: "hinge_embedding_loss",
    nn.MarginRankingLoss: "margin_ranking_loss",
    nn.SoftMarginLoss: "soft_margin_loss",
    nn.MultiLabelMarginLoss: "multilabel_margin_loss",
    nn.MultiLabelSoftMarginLoss: "multilabel_soft_margin_loss",
    nn.MultiMarginLoss: "multi_margin_loss",
    nn.CosineEmbeddingLoss: "cosine_embedding_loss",
    nn.TripletMarginLoss: "triplet_margin_loss",
    nn.TripletMarginWithDistanceLoss: "triplet_margin_with_distance_loss",
    nn.CTCLoss: "ctc_loss",
}
_REDUCTIONS = ("none", "mean", "sum")  # in the order of torch's enumeration


@dataclass(frozen=True, slots=True)
class LossCall:
    """A call of one of torch's loss functions or loss modules."""

    reduction: str
    operands: tuple[Any, ...]  # the tensors that are compared
    target: Any = None  # None if the mean includes every element
    ignored: int = -100  # target that the mean excludes
    weight: Any = None  # class weights: a value, the path of a buffer, or None


def name_of(node: fx.Node) -> str:
    """Return the bare name of a node's target: ``mean`` for ``torch.mean``, ``x.mean()`` and ``aten.mean``."""
    if node.op == "call_module":
        return ""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).rpartition("::")[2]
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))


def loss_call(node: fx.Node, module: fx.GraphModule) -> LossCall | None:
    """Describe a call of one of torch's loss functions or loss modules, or return None for any other call."""
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        name = _MODULES.get(type(called), "")
        given = dict(vars(called))
        operands = tuple(node.args) + tuple(node.kwargs.values())
        weight: Any = None
        if called._buffers.get("weight") is not None:
            weight = f"{node.target}.weight"
    else:
        name = name_of(node)
        given = _bound(node) if name in _INDEXED | _ELEMENTWISE else {}
        operands = tuple(value for value in node.all_input_nodes)
        weight = given.get("weight")
    if name in _ELEMENTWISE:
        return LossCall(_reduction(given), operands)
    if name not in _INDEXED:
        return None
    if node.op == "call_module":
        target = node.args[1] if len(node.args) > 1 else node.kwargs.get("target")
    else:
        target = given.get("target")
    ignored = given.get("ignore_index", -100)
    return LossCall(_reduction(given), operands, target, ignored if isinstance(ignored, int) else -100, weight)


def _reduction(given: Mapping[str, Any]) -> str:
    """Return none, mean or sum, or "" if the reduction is unknown."""
    if given.get("size_average") is not None or given.get("reduce") is not None:
        if given.get("reduce") is False:
            return "none"
        return "sum" if given.get("size_average") is False else "mean"
    reduction = given.get("reduction", "mean")
    if isinstance(reduction, int) and 0 <= reduction < len(_REDUCTIONS):
        return _REDUCTIONS[reduction]
    return "mean" if reduction == "batchmean" else str(reduction)


def _bound(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        names = [argument.name for argument in schema.arguments]
        given = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
        return {**given, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    function = node.target if callable(node.target) else None
    if not inspect.isfunction(function):
        function = getattr(functional, name_of(node), None)
    if not inspect.isfunction(function):
        return dict(node.kwargs)
    try:
        bound = inspect.signature(function, follow_wrapped=False).bind(*node.args, **node.kwargs)
    except TypeError:
        return dict(node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)

"""How a batch meets the model: which call the signature of its forward asks for, and where the output has the loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from autopipe.workload.batches.items import Item

Form = Literal["dict", "whole dict", "mapping", "tuple", "tensor", "tuple and target", "tensor and target"]
_TARGETS = ("target", "targets", "label", "labels", "y")
_EMPTY = inspect.Parameter.empty


def form_of_call(model: nn.Module, item: Item, *, has_loss: bool) -> Form:
    """Return how the model is called on a batch. ``has_loss``: a loss hook gets the target."""
    if isinstance(item, Mapping):
        return "whole dict" if _takes_whole(model, item) else "dict"
    inputs = item[0]
    if isinstance(inputs, Mapping):
        return "tensor" if _takes_whole(model, inputs) else "mapping"
    is_tuple = isinstance(inputs, (tuple, list))
    if has_loss or item[1] is None or not _takes_target(model, len(inputs) if is_tuple else 1):
        return "tuple" if is_tuple else "tensor"
    return "tuple and target" if is_tuple else "tensor and target"


def output_of(model: nn.Module, item: Item, *, has_loss: bool) -> Any:
    """Return the output of the model for a batch. ``has_loss``: a loss hook gets the target."""
    form = form_of_call(model, item, has_loss=has_loss)
    if isinstance(item, Mapping):
        return model(item) if form == "whole dict" else model(**item)
    inputs, target = item
    match form:
        case "mapping":
            return model(**inputs)
        case "tuple":
            return model(*inputs)
        case "tuple and target":
            return model(*inputs, target)
        case "tensor and target":
            return model(inputs, target)
    return model(inputs)


def carried_by(output: Any) -> Any:
    """Return the loss in the output of a model, or None."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if type(output) is tuple and len(output) == 2:  # (logits, loss)
        scalars = [value for value in output if isinstance(value, Tensor) and not value.dim()]
        return scalars[0] if len(scalars) == 1 and scalars[0].is_floating_point() else None
    return getattr(output, "loss", None)


def _takes_whole(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Return whether the forward takes a dict as its only argument, and none of the entries by name."""
    parameters = _parameters(model)
    kinds = {parameter.kind for parameter in parameters}
    if not parameters or inspect.Parameter.VAR_KEYWORD in kinds or any(entry.name in inputs for entry in parameters):
        return False
    positional = parameters[0].kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return positional and all(parameter.default is not _EMPTY for parameter in parameters[1:])


def _takes_target(model: nn.Module, count: int) -> bool:
    """Return whether the argument of the forward behind the first ``count`` is an optional target."""
    rest = _parameters(model)[count : count + 1]
    return any(parameter.name in _TARGETS and parameter.default is None for parameter in rest)


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return []


__all__ = ["Form", "carried_by", "form_of_call", "output_of"]

"""``LossFunction``: the loss of one batch.

How a batch meets the model::

    (inputs, target)   loss(model(*inputs), target)     inputs: a tensor, a tuple of arguments, or a dict of them
    dict               model(**batch), whose output carries the loss; with a loss hook: loss(output, batch)
    no loss hook       output.loss, output["loss"], or an output that is a scalar
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.draws import opaque_calls
from autopipe.errors import ModelFileError, with_article
from autopipe.workload.batches.items import Item
from autopipe.workload.hooks.own_loss import OwnLoss, carried_by, output_of

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LossFunction:
    """Runs the model on a batch and returns its loss."""

    def __init__(self, own_loss: OwnLoss, name: str, path: str, precision: str) -> None:
        self._own_loss = own_loss
        self._name = name  # of the model, for errors
        self._path = path  # of the model file, for errors
        self._precision = precision

    def __call__(
        self, model: nn.Module, item: Item, opaque_modules: Sequence[str] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss of a batch, and its weight in the mean of the minibatch if the loss hook returns one.

        ``opaque_modules``: modules that run as the user's own code, each with its own random draws.

        Raises: ModelFileError if the result is not a scalar loss. The user's own exceptions propagate unchanged.
        """
        hook = self._own_loss.hook
        with opaque_calls(model, opaque_modules), self._autocast(model):
            output, loss = self._output_and_loss(model, item)
        weight = None
        if hook is not None and isinstance(loss, (tuple, list)) and len(loss) == 2:
            loss, weight = loss
        if not isinstance(loss, Tensor) or (hook is None and loss is output and loss.dim() != 0):
            raise self._no_loss(output, loss)
        if loss.dim() != 0:
            raise ModelFileError(
                f"the loss of {self._name} has shape {tuple(loss.shape)}; expected a scalar",
                where=hook.path if hook else self._path,
                remedy="reduce it, for example with .mean()",
            )
        if weight is not None and not isinstance(weight, Tensor):
            weight = torch.full((), weight, dtype=loss.dtype, device=loss.device)
        return loss, weight

    def _autocast(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Enter autocast for bf16 and fp16, as a plain script would around its forward and loss."""
        if self._precision == "fp32":
            return contextlib.nullcontext()
        device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        return torch.autocast(device, dtype=_PRECISIONS[self._precision])

    def _output_and_loss(self, model: nn.Module, item: Item) -> tuple[Any, Any]:
        """Return the model's output for a batch, and the result of the loss hook or the loss in the output."""
        with self._own_loss.detached(model):
            output = output_of(model, item)
        if self._own_loss.hook is None:
            return output, carried_by(output)
        target = item if isinstance(item, Mapping) else item[1]
        return output, self._own_loss.function(model, output)(output, target)

    def _no_loss(self, output: Any, loss: Any) -> ModelFileError:
        hook = self._own_loss.hook
        if hook is not None:
            return ModelFileError(
                f"{hook.label} returned {with_article(type(loss).__name__)}; expected a scalar tensor, "
                "or (scalar, weight)",
                where=hook.path,
                remedy="return the loss as a tensor",
            )
        kind = type(output).__name__
        if isinstance(output, Tensor):
            kind = f"a tensor of shape {tuple(output.shape)}"
        return ModelFileError(
            f"the output of {self._name} ({kind}) carries no loss: looked for a loss hook, "
            'output.loss, output["loss"] and a scalar output',
            where=self._path,
            remedy="define loss(output, target) in the model file, give --loss torch.nn:CrossEntropyLoss, "
            "or put labels into the batch",
        )

"""``LossFunction``: the loss of one batch.

How a batch meets the model::

    (inputs, target)   loss(model(*inputs), target)     inputs: a tensor, a tuple of arguments, or a dict of them
    dict               model(**batch), whose output carries the loss; with a loss hook: loss(output, batch)
    no loss hook       output.loss, output["loss"], (logits, loss), or an output that is a scalar

A forward whose only argument is a dict gets it whole. Without a loss hook, a forward that takes ``targets=None`` behind
its inputs gets the target.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopipe.draws import opaque_calls
from autopipe.errors import ModelFileError, with_article
from autopipe.workload.batches.items import COMPARE_SHAPES, CORRECT, UNRELATED, Item, remedy_of, shape_of
from autopipe.workload.hooks.calling import carried_by, output_of
from autopipe.workload.hooks.own_loss import OwnLoss
from autopipe.workload.target.targets import user_line

_FAILED_ON = "_autopipe_loss_failed_on"  # attribute of an exception of the loss: output, target, function
_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}

_OF_FLOATS = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)
_FLATTENED = "return F.cross_entropy(output.flatten(0, -2), target.flatten())"
_MAX_LEAVES = 4  # of an output, in a message


class LossFunction:
    """Runs the model on a batch and returns its loss."""

    def __init__(
        self,
        own_loss: OwnLoss,
        name: str,
        path: str,
        precision: str,
        *,
        likely: tuple[str, Any] = ("", None),
        synthetic: bool = False,
    ) -> None:
        self._own_loss = own_loss
        self._name = name  # of the model, for errors
        self._path = path  # of the model file, for errors
        self._precision = precision
        self._likely = likely  # the name and value of what may be the loss in the model file; "" without one
        self._synthetic = synthetic  # whether the batches are those of --input

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
            raise self._no_loss(output, loss, item)
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
            output = output_of(model, item, has_loss=self._own_loss.hook is not None)
        if self._own_loss.hook is None:
            return output, carried_by(output)
        target = item if isinstance(item, Mapping) else item[1]
        function = self._own_loss.function(model, output)
        try:
            return output, function(output, target)
        except Exception as error:
            vars(error)[_FAILED_ON] = (output, target, function)
            raise

    def failure(self, error: Exception, item: Item) -> ModelFileError | None:
        """Return the error for an exception that the loss hook raised on a batch; None for another exception."""
        failed_on = vars(error).get(_FAILED_ON)
        if failed_on is None:
            return None
        output, target, function = failed_on
        lacks = _lacks_target(error, item)
        given = "no target" if lacks else f"target {_described(target)}"
        return ModelFileError(
            f"the loss failed: output {_described(output)}, {given}: {type(error).__name__}: {error}",
            where=user_line(error, self._path),
            remedy=remedy(error, output, lacks, function, synthetic=self._synthetic),
        )

    def _no_loss(self, output: Any, loss: Any, item: Item) -> ModelFileError:
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
            'output.loss, output["loss"] and a scalar output, also in (logits, loss)',
            where=self._path,
            remedy=self._remedy(output, item),
        )

    def _remedy(self, output: Any, item: Item) -> str:
        """Return how to give a loss, and the target that it needs."""
        own = "define loss(output, target) in the model file"
        if isinstance(output, (tuple, list)) and any(value is None for value in output):
            return f"let data give ((inputs, target), None), if forward returns the loss for a target; or {own}"
        if not isinstance(output, Tensor):
            return f"{own}, which gets this output ({_described(output)}); or return the loss as output.loss"
        name, function = self._likely
        option = f"--loss :{name}" if name else "--loss torch.nn:CrossEntropyLoss"
        target = ""
        if not _has_target(item):
            target = f", and {_target_for(output, function, synthetic=self._synthetic)}"
        return f"give {option}{target}; or define loss(output, target) in the model file, or put labels into the batch"


def _described(value: Any) -> str:
    """Return the shapes of an output or a target: ``float32[8, 3]``, ``{'x': int64[8]}``, ``None``."""
    if isinstance(value, Tensor):
        return shape_of(value)
    leaves = pytree.tree_flatten_with_path(value)[0]
    tensors = [f"{pytree.keystr(path)}: {shape_of(leaf)}" for path, leaf in leaves if isinstance(leaf, Tensor)]
    shown = ", ".join(tensors[:_MAX_LEAVES]) + (", ..." if len(tensors) > _MAX_LEAVES else "")
    kind = "" if value is None else type(value).__name__
    return f"{kind}({shown})" if tensors else kind or "None"


def _has_target(item: Item) -> bool:
    """Return whether a batch has a target apart from the inputs."""
    return not isinstance(item, Mapping) and item[1] is not None


def _lacks_target(error: Exception, item: Item) -> bool:
    """Return whether a loss failed because the batch has no target: it got None, or the dict that is the batch."""
    return not _has_target(item) and ("dict" if isinstance(item, Mapping) else "None") in str(error)


def _target_for(output: Any, function: Any, *, synthetic: bool) -> str:
    """Return how to give a target that the loss ``function`` takes with this output. ``synthetic``: with --input."""
    if not synthetic:
        return "let data give (inputs, target)"
    sizes = [int(size) for size in output.shape] if isinstance(output, Tensor) else [32, 10]
    if isinstance(function, _OF_FLOATS) or len(sizes) < 2:
        return f'add --input "target:f32{_written(sizes)}"'
    return f'add --input "target:i64{_written(sizes[:-1])}<{sizes[-1]}>"'


def remedy(error: Exception, output: Any, lacks: bool, function: Any, *, synthetic: bool) -> str:
    """Return the remedy for a loss ``function`` that failed on an output. ``lacks``: it got no target."""
    classes_last = isinstance(function, nn.CrossEntropyLoss) and isinstance(output, Tensor) and output.dim() > 2
    flattened = f"CrossEntropyLoss takes the classes in dimension 1: define loss(output, target): {_FLATTENED}"
    if lacks:
        added = f"the batch has no target: {_target_for(output, function, synthetic=synthetic)}"
        return f"{added}; {flattened}" if classes_last else added
    if isinstance(error, UNRELATED):
        return CORRECT
    if remedy_of(error) != COMPARE_SHAPES:
        return remedy_of(error)
    return flattened if classes_last else "compare the shapes of output and target with what the loss takes"


def pair_of(keys: Sequence[str], arguments: Sequence[str]) -> str:
    """Return the pair that data should give instead of a dict with keys that the forward does not take."""
    inputs = [key for key in keys if key in arguments] or list(keys[:1])
    others = [key for key in keys if key not in inputs]
    return f"({_items(inputs)}, {_items(others)})"


def _items(keys: Sequence[str]) -> str:
    read = ", ".join(f'batch["{key}"]' for key in keys)
    return read if len(keys) == 1 else f"({read})"


def _written(sizes: Sequence[int]) -> str:
    return f"[{','.join(str(size) for size in sizes)}]"

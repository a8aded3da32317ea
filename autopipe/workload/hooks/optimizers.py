"""The optimizer: the user's hook, or one of torch's by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils import _pytree as pytree

from autopipe.errors import ModelFileError, unknown_choice, with_article
from autopipe.workload.hooks.candidates import takes
from autopipe.workload.hooks.hook import Hook
from autopipe.workload.target.targets import advising

T = TypeVar("T")
Named = Sequence[tuple[str, Parameter]]


def known_optimizers() -> dict[str, type[Optimizer]]:
    """Return torch's optimizers by lower-case name, without those that need a closure or sparse gradients."""
    classes = {}
    for name, value in vars(torch.optim).items():
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer:
            classes[name.lower()] = value
    return {name: classes[name] for name in sorted(classes) if name not in ("lbfgs", "sparseadam")}


def named_optimizer(name: str) -> type[Optimizer]:
    """Return the class of ``--optimizer NAME``.

    Raises: ModelFileError with the known names.
    """
    known = known_optimizers()
    if name.lower() not in known:
        raise ModelFileError(
            unknown_choice("optimizer", name, known), remedy="or give a function: --optimizer file.py:ATTR"
        )
    return known[name.lower()]


def make_optimizer(hook: Hook, named: Named, lr: float | None) -> Optimizer:
    """Call the user's optimizer hook, or instantiate it if it is a class, and apply ``--lr``.

    Raises: ModelFileError if it fails, returns another type, or uses several learning rates and ``--lr`` is given.
    """
    if isinstance(hook.function, type):
        instance = _instantiated(hook, list(named), lr)
        return _steps_on_gradients(hook, checked(hook, instance, Optimizer))
    optimizer = _steps_on_gradients(hook, checked(hook, hook(list(named)), Optimizer))
    if lr is not None:
        rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
        if len(rates) > 1:
            raise ModelFileError(
                f"{hook.label} uses {len(rates)} learning rates ({', '.join(f'{rate:g}' for rate in rates)}), "
                f"and --lr {lr:g} cannot replace all of them",
                where=hook.path,
                remedy="set them in the hook and omit --lr",
            )
        for group in optimizer.param_groups:
            group["lr"] = lr
    return optimizer


def _instantiated(hook: Hook, named: list[tuple[str, Parameter]], lr: float | None) -> object:
    if lr is None:
        return hook(named)
    with advising(f"see whether {hook.origin} takes a learning rate of {lr:g} (--lr)"):
        return hook(named, lr=lr)


def _steps_on_gradients(hook: Hook, optimizer: Optimizer) -> Optimizer:
    """Return the optimizer if it steps on dense gradients alone, once per minibatch, as a pipeline needs.

    Raises: ModelFileError otherwise.
    """
    name = type(optimizer).__name__
    # of the class: a scheduler wraps the step of the object and hides its arguments
    if not takes(type(optimizer).step, 1):
        raise ModelFileError(
            f"{hook.label} returned {with_article(name)}, whose step needs a closure that runs the whole model again",
            where=hook.path,
            remedy="choose one that steps on gradients alone, such as AdamW or SGD",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ModelFileError(
            f"{hook.label} returned {with_article(name)}, which takes only sparse gradients; here they are dense",
            where=hook.path,
            remedy="use another optimizer, such as AdamW, and sparse=False in the embedding",
        )
    return optimizer


def checked(hook: Hook, value: object, kind: type[T]) -> T:
    """Return the result of the hook if it has the expected type.

    Raises: ModelFileError otherwise.
    """
    if not isinstance(value, kind):
        raise ModelFileError(
            f"{hook.label} returned {with_article(type(value).__name__)}, not a torch {kind.__name__}",
            where=hook.path,
            remedy=f"return the {kind.__name__}",
        )
    return value


def make_scheduler(hook: Hook, optimizer: Optimizer) -> LRScheduler:
    """Call the user's scheduler hook.

    Raises: ModelFileError if it fails, returns another type, or a scheduler whose ``step`` needs an argument.
    """
    scheduler = checked(hook, hook(optimizer), LRScheduler)
    name = type(scheduler).__name__
    # refused even if a subclass has a default for the metric
    if not takes(scheduler.step, 0) or isinstance(scheduler, ReduceLROnPlateau):
        raise ModelFileError(
            f"{hook.label} returned {with_article(name)}, whose step needs an argument, such as a metric; "
            "a pipeline calls scheduler.step() after every optimizer step, without one",
            where=hook.path,
            remedy="use one that depends on the number of steps, such as CosineAnnealingLR or LambdaLR; to lower the "
            "rate by hand, omit the scheduler and continue from a checkpoint with --resume --lr",
        )
    known = {id(parameter) for parameter in stepped(optimizer)}
    if any(id(parameter) not in known for parameter in stepped(scheduler.optimizer)):
        raise ModelFileError(
            f"{hook.label} returned {with_article(name)} of another optimizer than it was given",
            where=hook.path,
            remedy="make the scheduler for the optimizer that is the argument of the hook",
        )
    return scheduler


def stepped(optimizer: Optimizer) -> list[Parameter]:
    """Return the parameters that an optimizer steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def default_optimizer(kind: type[Optimizer], named: Named, lr: float | None) -> Optimizer:
    """Return one of torch's optimizers with its defaults, except for ``lr``."""
    return make_optimizer(Hook("optimizer", kind, f"torch.optim.{kind.__name__}", ""), named, lr)


def is_of_torch(optimizer: Optimizer, scheduler: LRScheduler | None = None) -> bool:
    """Return whether a step runs torch's code only: that of classes of ``torch.optim``, without functions of others."""
    things: list[Any] = [optimizer] if scheduler is None else [optimizer, scheduler]
    if not all(type(thing).__module__.startswith("torch.optim") for thing in things):
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    parts = [] if scheduler is None else pytree.tree_leaves([*vars(scheduler).values()])
    inner = [part for part in parts if isinstance(part, LRScheduler)]
    return not any(map(callable, parts)) and all(is_of_torch(optimizer, part) for part in inner)

"""The optimizer: the user's hook, or one of torch's by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from autopipe.errors import ModelFileError, unknown_choice, with_article
from autopipe.workload.hooks.hook import Hook, takes
from autopipe.workload.target.targets import advising

T = TypeVar("T")
Named = Sequence[tuple[str, Parameter]]


def known_optimizers() -> dict[str, type[Optimizer]]:
    """Return torch's optimizers by lower-case name, without those that need a closure or sparse gradients."""
    found = {}
    for name, value in vars(torch.optim).items():
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer:
            found[name.lower()] = value
    return {name: found[name] for name in sorted(found) if name not in ("lbfgs", "sparseadam")}


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
    """Call the user's optimizer hook, or instantiate the class that it is, and put ``--lr`` in.

    Raises: ModelFileError when it fails, gives something else, or leaves several learning rates to one ``--lr``.
    """
    if isinstance(hook.function, type):
        made = _with_rate(hook, list(named), lr)
        return _stepping(hook, checked(hook, made, Optimizer))
    optimizer = _stepping(hook, checked(hook, hook(list(named)), Optimizer))
    if lr is not None:
        rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
        if len(rates) > 1:
            raise ModelFileError(
                f"{hook.label} uses {len(rates)} learning rates ({', '.join(f'{rate:g}' for rate in rates)}), "
                f"and --lr {lr:g} cannot stand for all of them",
                where=hook.path,
                remedy="set them in the hook and leave --lr out",
            )
        for group in optimizer.param_groups:
            group["lr"] = lr
    return optimizer


def _with_rate(hook: Hook, named: list[tuple[str, Parameter]], lr: float | None) -> object:
    if lr is None:
        return hook(named)
    with advising(f"see whether {hook.origin} takes a learning rate of {lr:g} (--lr)"):
        return hook(named, lr=lr)


def _stepping(hook: Hook, optimizer: Optimizer) -> Optimizer:
    """Refuse an optimizer that cannot step on what a pipeline gives it: dense gradients, once a minibatch.

    Raises: ModelFileError.
    """
    name = type(optimizer).__name__
    # of the class: a scheduler wraps the step of the object, and hides its arguments
    if not takes(type(optimizer).step, 1):
        raise ModelFileError(
            f"{hook.label} gave {with_article(name)}, whose step needs a closure that runs the whole model again",
            where=hook.path,
            remedy="choose one that steps on gradients alone, such as AdamW or SGD",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ModelFileError(
            f"{hook.label} gave {with_article(name)}, which takes sparse gradients alone; here they are dense",
            where=hook.path,
            remedy="choose AdamW or another one, and sparse=False in the embedding",
        )
    return optimizer


def checked(hook: Hook, made: object, kind: type[T]) -> T:
    """Return what the hook made, if it is of the kind that was asked for.

    Raises: ModelFileError otherwise.
    """
    if not isinstance(made, kind):
        raise ModelFileError(
            f"{hook.label} gave {with_article(type(made).__name__)}, not a torch {kind.__name__}",
            where=hook.path,
            remedy=f"return the {kind.__name__} from it",
        )
    return made


def make_scheduler(hook: Hook, optimizer: Optimizer) -> LRScheduler:
    """Call the user's scheduler hook.

    Raises: ModelFileError when it fails, gives something else, or a scheduler whose ``step`` needs an argument.
    """
    scheduler = checked(hook, hook(optimizer), LRScheduler)
    name = type(scheduler).__name__
    # ReduceLROnPlateau must be refused even where its subclass has a default for the metric
    if not takes(scheduler.step, 0) or isinstance(scheduler, ReduceLROnPlateau):
        raise ModelFileError(
            f"{hook.label} gave {with_article(name)}, whose step needs an argument, such as a metric; "
            "a pipeline calls scheduler.step() after every optimizer step, without one",
            where=hook.path,
            remedy="choose one that goes by the number of steps, such as CosineAnnealingLR or LambdaLR; to lower the "
            "rate by hand, leave the scheduler out and go on from a checkpoint with --resume --lr",
        )
    given = {id(parameter) for parameter in stepped(optimizer)}
    if any(id(parameter) not in given for parameter in stepped(scheduler.optimizer)):
        raise ModelFileError(
            f"{hook.label} gave {with_article(name)} of another optimizer than it was given",
            where=hook.path,
            remedy="make the scheduler for the optimizer that is the argument of the hook",
        )
    return scheduler


def stepped(optimizer: Optimizer) -> list[Parameter]:
    """Return the parameters that an optimizer steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def default_optimizer(kind: type[Optimizer], named: Named, lr: float | None) -> Optimizer:
    """Return one of torch's optimizers, with its own defaults but for ``lr``."""
    return make_optimizer(Hook("optimizer", kind, f"torch.optim.{kind.__name__}", ""), named, lr)

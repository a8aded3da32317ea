"""Training and evaluation mode of a model's parts, as the user set them."""

from __future__ import annotations

from torch import nn

from autopipe.errors import counted

_SHOWN = 3  # modules that a note names


def trains(model: nn.Module) -> bool:
    """Tell whether any part of a model is in training mode."""
    return any(module.training for module in model.modules())


def for_training(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the model ready to train, and what is to be said of its modes, "" for nothing.

    A model whose parts differ in mode stays exactly as it is. Else it is ``model.train()`` that a script calls: where
    the whole model is in evaluation mode, as ``from_pretrained`` returns it, and where a ``train`` of the model's own
    keeps some parts in evaluation mode.
    """
    modes = {module.training for module in model.modules()}
    if len(modes) == 1:
        model.train()
        return model, "" if True in modes else "the model comes in evaluation mode; train() puts it into training mode"
    fixed = [path for path, module in model.named_modules() if not module.training]
    outermost = [path for path in fixed if path.rpartition(".")[0] not in fixed or not path]
    named = [path or "the model itself" for path in outermost[:_SHOWN]]
    more = f" and {len(outermost) - _SHOWN} more" if len(outermost) > _SHOWN else ""
    return model, (
        f"{counted(len(fixed), 'module')} of {len(list(model.modules()))} in evaluation mode, as the model file sets "
        f"them: {', '.join(named)}{more} (model.train() where the model is built changes that)"
    )

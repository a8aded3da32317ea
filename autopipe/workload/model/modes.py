"""Training and evaluation mode of the modules of a model, as the user set them."""

from __future__ import annotations

from torch import nn

from autopipe.errors import counted

_SHOWN = 3  # modules that a note names


def trains(model: nn.Module) -> bool:
    """Return whether any module of a model is in training mode."""
    return any(module.training for module in model.modules())


def for_training(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the model ready to train, and a note for the user on its modes, or "".

    A model whose modules differ in mode stays as it is. Otherwise ``model.train()`` is called, as in a script: a model
    of ``from_pretrained`` comes in evaluation mode, and a ``train`` of its own may keep some modules in that mode.
    """
    modes = {module.training for module in model.modules()}
    if len(modes) == 1:
        model.train()
        return model, "" if True in modes else "the model was in evaluation mode; train() was called"
    fixed = [path for path, module in model.named_modules() if not module.training]
    outermost = [path for path in fixed if path.rpartition(".")[0] not in fixed or not path]
    named = [path or "the model itself" for path in outermost[:_SHOWN]]
    more = f" and {len(outermost) - _SHOWN} more" if len(outermost) > _SHOWN else ""
    return model, (
        f"{counted(len(fixed), 'module')} of {len(list(model.modules()))} in evaluation mode, as the model file sets "
        f"them: {', '.join(named)}{more} (to change that, call model.train() where the model is built)"
    )

"""``Stage``: the base class of generated stage files. It takes its part of the user's model over, as it is.

A generated file says which modules, parameters and buffers of the model it runs; ``adopt`` hangs those very objects
under their original paths in plain containers (``self.transformer.h[1].ln1``). So ``state_dict()`` has the original
names, a tied parameter stays one object, and hooks, parametrizations and non-persistent buffers stay what they were.

What a stage needs beside the user's names is kept under names that no model uses, and reached through functions:
``draw(self, position)`` and ``device_of(self)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import nn

from autopipe import draws


class Container(nn.Module):
    """Stands where the user's own block stood: holds children, computes nothing. ``h[1]`` is ``h``'s child "1"."""

    def __getitem__(self, key: int | str) -> Any:
        return getattr(self, str(key))


class Stage(nn.Module):
    """One stage. Called with its ``INPUTS`` and ``RECEIVES`` in order, returns its ``SENDS`` and ``RETURNS`` in order.

    ``INPUTS``: tensors of the batch. ``RECEIVES``/``SENDS``: values from earlier and for later stages. ``RETURNS``:
    what the whole model returns (the loss, and its weight), on the last stage. ``MODULES``, ``PARAMETERS``,
    ``BUFFERS``: the paths it adopts; parameters and buffers of a module come with it and are not named again.
    ``CONSTANTS``: tensors that the model made once and keeps nowhere.
    """

    MODEL_DIGEST: ClassVar[str] = ""
    PLAN_DIGEST: ClassVar[str] = ""
    INDEX: ClassVar[int] = 0
    INPUTS: ClassVar[tuple[str, ...]] = ()
    RECEIVES: ClassVar[tuple[str, ...]] = ()
    SENDS: ClassVar[tuple[str, ...]] = ()
    RETURNS: ClassVar[tuple[str, ...]] = ()
    MODULES: ClassVar[tuple[str, ...]] = ()
    PARAMETERS: ClassVar[tuple[str, ...]] = ()
    BUFFERS: ClassVar[tuple[str, ...]] = ()
    CONSTANTS: ClassVar[tuple[str, ...]] = ()

    _autopipe_draws: tuple[int, int, int] = (0, 0, 0)
    _autopipe_device: torch.device = torch.device("cpu")
    _autopipe_modes: tuple[tuple[nn.Module, bool], ...] = ()

    @classmethod
    def adopt(cls, model: nn.Module, constants: Mapping[str, torch.Tensor]) -> Self:
        """Take over this stage's part of a model that was built: the same modules and parameters, no copy.

        Whatever mode the model's parts are in now is what ``train()`` will bring back, so a part that the user keeps in
        evaluation mode stays there.
        """
        stage = cls()
        for path in sorted(cls.MODULES, key=lambda path: path.count(".")):
            owner, name = _place(stage, model, path)
            if name not in owner._modules:
                owner.add_module(name, model.get_submodule(path))
        for path in cls.PARAMETERS:
            owner, name = _place(stage, model, path)
            owner.register_parameter(name, model.get_parameter(path))
        for path in cls.BUFFERS:
            owner, name = _place(stage, model, path)
            source = model.get_submodule(path.rpartition(".")[0])
            persistent = name not in source._non_persistent_buffers_set
            owner.register_buffer(name, model.get_buffer(path), persistent=persistent)
        for name in cls.CONSTANTS:
            stage.register_buffer(name, constants[name], persistent=False)
        modes = [(module, module.training) for path in cls.MODULES for module in model.get_submodule(path).modules()]
        stage._autopipe_modes = tuple(modes)
        return stage

    def train(self, mode: bool = True) -> Self:
        """Switch to training, each part to the mode it was adopted in, or to evaluation."""
        super().train(mode)
        if mode:
            for module, training in self._autopipe_modes:
                module.training = training
        return self

    def place(self, device: torch.device) -> Self:
        """Move to a device; what the forward makes anew is made there too."""
        self._autopipe_device = device
        return self.to(device)

    def seed(self, where: tuple[int, int, int]) -> None:
        """Say which (run seed, minibatch, microbatch) the next forward draws for."""
        self._autopipe_draws = where


def _place(stage: nn.Module, model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return what holds ``path`` in the stage, containers being made on the way, and the last part of the path."""
    *parents, name = path.split(".")
    owner = stage
    for parent in parents:
        child = owner._modules.get(parent)
        if child is None:
            child = Container()
            owner.add_module(parent, child)
        owner = child
    return owner, name


def draw(stage: Stage, position: int, count: int = 1) -> contextlib.AbstractContextManager[None]:
    """Give the call inside its random numbers: those of its place in the whole model, whatever the layout."""
    return draws.at(stage._autopipe_draws, position, count)


def device_of(stage: Stage) -> torch.device:
    """Return where the stage runs."""
    return stage._autopipe_device

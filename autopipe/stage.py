"""``Stage``: the base class of generated stage files. It takes its part of the user's model over, as it is.

A generated file says which modules, parameters and buffers of the model it runs; ``adopt`` hangs those very objects
under their original paths in plain containers (``self.transformer.h[1].ln1``). So ``state_dict()`` has the original
names, a tied parameter stays one object, and hooks, parametrizations and non-persistent buffers stay what they were.

What a stage needs beside the user's names is kept under names that no model uses, and reached through functions:
``draw(self, position)``, ``opaque_call(self, position)`` and ``device_of(self)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import nn

from autopipe import draws
from autopipe.errors import ArtifactError


class Container(nn.Module):
    """Stands where the user's own block stood: holds children, computes nothing. ``h[1]`` is ``h``'s child "1"."""

    def __getitem__(self, key: int | str) -> Any:
        """Return a child, parameter or buffer, also where its name is not one that Python takes after a dot."""
        for held in (self._modules, self._parameters, self._buffers):
            if str(key) in held:
                return held[str(key)]
        raise KeyError(key)


class Stage(Container):
    """One stage. Called with its ``INPUTS`` and ``RECEIVES`` in order, returns its ``SENDS`` and ``RETURNS`` in order.

    ``INPUTS``: tensors of the batch. ``RECEIVES``/``SENDS``: values from earlier and for later stages. ``RETURNS``:
    what the whole model returns (the loss, and its weight), on the last stage. ``MODULES``, ``PARAMETERS``,
    ``BUFFERS``: the paths it adopts; parameters and buffers of a module come with it and are not named again.
    ``SPARE``: modules that it adopts and does not call: the code for batches of another form may.
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
    SPARE: ClassVar[tuple[str, ...]] = ()
    PARAMETERS: ClassVar[tuple[str, ...]] = ()
    BUFFERS: ClassVar[tuple[str, ...]] = ()
    CONSTANTS: ClassVar[tuple[str, ...]] = ()

    _autopipe_draws: tuple[int, int, int] = (0, 0, 0)
    _autopipe_device: torch.device = torch.device("cpu")
    _autopipe_modes: tuple[tuple[nn.Module, bool], ...] = ()
    _autopipe_constants: tuple[str, ...] = ()
    _autopipe_stateless: Mapping[str, nn.Module] = MappingProxyType({})

    @classmethod
    def adopt(cls, model: nn.Module, constants: Mapping[str, torch.Tensor]) -> Self:
        """Take over this stage's part of a model that was built: the same modules and parameters, no copy.

        Whatever mode the model's parts are in now is what ``train()`` will bring back, so a part that the user keeps in
        evaluation mode stays there.

        Raises: ArtifactError naming what the file asks for and the model lacks.
        """
        stage = cls()
        modules, tensors = {*cls.MODULES, *cls.SPARE}, {*cls.PARAMETERS, *cls.BUFFERS}
        missing = {*modules, *tensors, *(name for name in cls.CONSTANTS if name not in constants)}
        inside = None
        # in the order of the model, so that of a tied parameter's names the first is the first here too
        for path, module in model.named_modules(remove_duplicate=False):
            if inside is not None and path.startswith(inside):
                continue
            if path in modules:
                owner, name = _place(stage, path)
                owner._modules[name] = module
                missing.discard(path)
                inside = f"{path}."
                continue
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                full = f"{path}.{name}" if path else name
                if full in tensors and tensor is not None:
                    _hold(_place(stage, full)[0], name, tensor, name not in module._non_persistent_buffers_set)
                    missing.discard(full)
        if missing:
            raise ArtifactError(
                f"stage {cls.INDEX} was written for a model with {min(missing)}, which this model lacks",
                remedy="autopipe generate",
            )
        for name in cls.CONSTANTS:
            stage.register_buffer(name, constants[name], persistent=False)
        whole = (*cls.MODULES, *cls.SPARE)
        modes = [(module, module.training) for path in whole for module in model.get_submodule(path).modules()]
        stage._autopipe_modes = tuple(modes)
        stage._autopipe_stateless = {path: module for path, module in model.named_modules() if _is_stateless(module)}
        stage.training = any(module.training for module in model.modules())
        return stage

    def take_over(self, code: type[Stage], constants: Mapping[str, torch.Tensor]) -> None:
        """Make ready to run the code of another recording of the same model, over the modules that are held already.

        Raises: ArtifactError naming what that code asks for and the stage lacks.
        """
        for path in code.MODULES:
            self._take_stateless(path)
            held: Any = self
            for name in path.split("."):
                held = held._modules.get(name) if isinstance(held, nn.Module) else None
            if not isinstance(held, nn.Module) or isinstance(held, Container):
                raise ArtifactError(
                    f"stage {code.INDEX} would need {path}, which it does not hold, for another shape of the batch",
                    remedy="pad the batches to one shape",
                )
        for name in code.CONSTANTS:
            self.register_buffer(name, constants[name].to(self._autopipe_device), persistent=False)
        self._autopipe_constants = (*self._autopipe_constants, *code.CONSTANTS)

    def _take_stateless(self, path: str) -> None:
        """Adopt a module that has no parameter and no buffer, where the stage does not hold it yet."""
        module = self._autopipe_stateless.get(path)
        if module is None:
            return
        owner, name = _place(self, path)
        if name not in owner._modules:
            owner._modules[name] = module
            self._autopipe_modes = (*self._autopipe_modes, (module, module.training))
            if not self.training:
                module.eval()

    @property
    def constants(self) -> tuple[str, ...]:
        """The names of the tensors that are neither parameter nor buffer of the model."""
        return (*self.CONSTANTS, *self._autopipe_constants)

    def run(self, code: type[Stage], *arguments: torch.Tensor) -> Any:
        """Call the stage, or the code of another recording with what this stage holds."""
        return self(*arguments) if code is type(self) else code.forward(self, *arguments)

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
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.modules():
            for name, buffer in module._buffers.items():
                places.setdefault(id(buffer), []).append((module, name))
        self.to(device)
        for (owner, name), *others in places.values():  # a buffer with two names stays one; torch makes a copy of each
            for other, other_name in others:
                other._buffers[other_name] = owner._buffers[name]
        return self

    def seed(self, where: tuple[int, int, int]) -> None:
        """Say which (run seed, minibatch, microbatch) the next forward draws for."""
        self._autopipe_draws = where


def _is_stateless(module: nn.Module) -> bool:
    return not (module._modules or module._parameters or module._buffers)


def _place(stage: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return what holds ``path`` in the stage, containers being made on the way, and the last part of the path."""
    *parents, name = path.split(".")
    owner = stage
    for parent in parents:
        child = owner._modules.get(parent)
        if child is None:
            child = owner._modules[parent] = Container()
        owner = child
    return owner, name


def _hold(owner: nn.Module, name: str, tensor: torch.Tensor, persistent: bool) -> None:
    """Register a tensor. Not by ``register_buffer``: it refuses names that are also those of a method."""
    if isinstance(tensor, nn.Parameter):
        owner._parameters[name] = tensor
        return
    owner._buffers[name] = tensor
    if not persistent:
        owner._non_persistent_buffers_set.add(name)


def draw(stage: Stage, position: int, count: int = 1) -> contextlib.AbstractContextManager[None]:
    """Give the call inside its random numbers: those of its place in the whole model, whatever the layout."""
    return draws.at(stage._autopipe_draws, position, count)


def opaque_call(stage: Stage, position: int) -> contextlib.AbstractContextManager[None]:
    """Give the call of a module that runs as it is its random numbers, of torch, Python and numpy."""
    return draws.inside(stage._autopipe_draws, position)


def device_of(stage: Stage) -> torch.device:
    """Return where the stage runs."""
    return stage._autopipe_device

"""``Stage``: the base class of generated stage files. It adopts its part of the user's model unchanged.

A generated file names the modules, parameters and buffers of the model that it runs. ``adopt`` attaches these very
objects under their original paths in plain containers (``self.transformer.h[1].ln1``). ``state_dict()`` therefore has
the original names, a tied parameter stays one object, and hooks, parametrizations and non-persistent buffers keep
working.

The stage's own attributes have names that no model uses, and are accessed through functions: ``draw(self, position)``,
``opaque_call(self, position)`` and ``device_of(self)``. A part of a forward that recompute by block runs again is a
function inside it, called through ``recomputed(unit, ...)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopipe import draws
from autopipe.errors import ArtifactError
from autopipe.ir.teams.axes import Place, Segment
from autopipe.team import Alone, Along, Team, cut


class Container(nn.Module):
    """Replaces a container of the model: has children, but no forward. ``h[1]`` is the child "1" of ``h``."""

    def __getitem__(self, key: int | str) -> Any:
        """Return a child, parameter or buffer of any name, even one that is not a Python identifier."""
        for entries in (self._modules, self._parameters, self._buffers):
            if str(key) in entries:
                return entries[str(key)]
        raise KeyError(key)


class Stage(Container):
    """One stage. ``forward`` takes ``INPUTS`` and ``RECEIVES``, and returns ``SENDS`` and ``RETURNS``, in order."""

    MODEL_DIGEST: ClassVar[str] = ""
    PLAN_DIGEST: ClassVar[str] = ""
    INDEX: ClassVar[int] = 0
    INPUTS: ClassVar[tuple[str, ...]] = ()  # tensors of the batch
    RECEIVES: ClassVar[tuple[str, ...]] = ()  # values from earlier stages
    SENDS: ClassVar[tuple[str, ...]] = ()  # values for later stages
    RETURNS: ClassVar[tuple[str, ...]] = ()  # in the last stage: the loss, and its weight
    MODULES: ClassVar[tuple[str, ...]] = ()  # paths of modules to adopt, with all their parameters and buffers
    SPARE: ClassVar[tuple[str, ...]] = ()  # modules to adopt that only the code for batches of another form calls
    PARAMETERS: ClassVar[tuple[str, ...]] = ()  # further parameters to adopt
    BUFFERS: ClassVar[tuple[str, ...]] = ()  # further buffers to adopt
    CONSTANTS: ClassVar[tuple[str, ...]] = ()  # tensors that the forward reads, neither parameters nor buffers
    TEAM: ClassVar[int] = 1  # members that run the stage together; see ``autopipe.team``
    # what each member has of a tensor: its dimension that is cut, the size of the axis, and (length, inner) of segments
    SHARDS: ClassVar[Mapping[str, Along]] = MappingProxyType({})

    PARTIAL: ClassVar[tuple[str, ...]] = ()  # complete parameters whose gradients are summed over the members

    # (run seed, minibatch, microbatch) of the next forward; None: it draws from the generator as it is
    _autopipe_draws: tuple[int, int, int] | None = (0, 0, 0)
    _autopipe_device: torch.device = torch.device("cpu")
    _autopipe_modes: tuple[tuple[nn.Module, bool], ...] = ()  # adopted modules, and whether they train
    _autopipe_constants: tuple[str, ...] = ()  # of the code of other recordings
    _autopipe_stateless: Mapping[str, nn.Module] = MappingProxyType({})  # modules without parameters and buffers
    _autopipe_team: Team = Alone()
    _autopipe_run: Callable[..., Any] | None = None  # runs the stage when gradients are on; see runtime.compiled

    @classmethod
    def adopt(cls, model: nn.Module, constants: Mapping[str, torch.Tensor]) -> Self:
        """Return a stage with its part of a model: the same modules and parameters, not copies.

        ``train()`` restores the current mode of each module, so that a module that the user keeps in evaluation mode
        remains in it.

        Raises: ArtifactError naming a path of the file that the model does not have.
        """
        stage = cls()
        modules, tensors = {*cls.MODULES, *cls.SPARE}, {*cls.PARAMETERS, *cls.BUFFERS}
        missing = {*modules, *tensors, *(name for name in cls.CONSTANTS if name not in constants)}
        inside = None
        # in the order of the model, so that the first name of a tied parameter is the first here too
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
                    _register(_place(stage, full)[0], name, tensor, name not in module._non_persistent_buffers_set)
                    missing.discard(full)
        if missing:
            raise ArtifactError(
                f"stage {cls.INDEX} was written for a model with {min(missing)}, which this model does not have",
                remedy="autopipe generate",
            )
        for name in cls.CONSTANTS:
            stage.register_buffer(name, constants[name], persistent=False)
        adopted = (*cls.MODULES, *cls.SPARE)
        modes = [(module, module.training) for path in adopted for module in model.get_submodule(path).modules()]
        stage._autopipe_modes = tuple(modes)
        stage._autopipe_stateless = {path: module for path, module in model.named_modules() if _is_stateless(module)}
        stage.training = any(module.training for module in model.modules())
        return stage

    def join(self, team: Team) -> None:
        """Become one member of a team: keep its part of every tensor that is cut. Each tensor stays the same object."""
        self._autopipe_team = team
        for name, (dimension, size, segments) in self.SHARDS.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                owner = owner._modules[part]  # type: ignore[assignment]  # ``adopt`` found it
            tensor = owner._parameters.get(last, owner._buffers.get(last))
            assert tensor is not None
            place = Place(name, dimension, tuple(Segment(*segment) for segment in segments))
            tensor.data = cut(tensor.data, place, size, team.member, team.size)

    def take_over(self, code: type[Stage], constants: Mapping[str, torch.Tensor]) -> None:
        """Prepare to run the code of another recording of the same model on the modules of this stage.

        Raises: ArtifactError naming a module of that code that the stage lacks.
        """
        for path in code.MODULES:
            self._take_stateless(path)
            module: Any = self
            for name in path.split("."):
                module = module._modules.get(name) if isinstance(module, nn.Module) else None
            if not isinstance(module, nn.Module) or isinstance(module, Container):
                raise ArtifactError(
                    f"stage {code.INDEX} does not have {path}, which another shape of the batch needs",
                    remedy="pad the batches to one shape",
                )
        for name in code.CONSTANTS:
            self.register_buffer(name, constants[name].to(self._autopipe_device), persistent=False)
        self._autopipe_constants = (*self._autopipe_constants, *code.CONSTANTS)

    def _take_stateless(self, path: str) -> None:
        """Adopt a module without parameters and buffers, unless the stage has it already."""
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
        """The names of the tensors that are neither parameters nor buffers of the model."""
        return (*self.CONSTANTS, *self._autopipe_constants)

    def run(self, code: type[Stage], *arguments: torch.Tensor) -> Any:
        """Call the stage, or the code of another recording with the modules of this stage."""
        if self._autopipe_run is not None and torch.is_grad_enabled():
            return self._autopipe_run(self, code, arguments)
        return self(*arguments) if code is type(self) else code.forward(self, *arguments)

    def train(self, mode: bool = True) -> Self:
        """Switch to training, each module to the mode it was adopted in, or to evaluation."""
        super().train(mode)
        if mode:
            for module, training in self._autopipe_modes:
                module.training = training
        return self

    def place(self, device: torch.device, *, parameters: bool = True) -> Self:
        """Move the stage to a device, with or without its parameters. Its forward also creates new tensors there."""
        self._autopipe_device = device
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.modules():
            for name, buffer in module._buffers.items():
                places.setdefault(id(buffer), []).append((module, name))
        if parameters:
            self.to(device)
        else:
            for module in self.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.to(device)
        draws.seed_recurrent_layers(self, device)
        for (owner, name), *others in places.values():  # torch copies a buffer with two names twice; keep one
            for other, other_name in others:
                other._buffers[other_name] = owner._buffers[name]
        return self

    def place_constants(self, device: torch.device, names: Iterable[str]) -> None:
        """Move the constants with these names to a device, on which the parameters are already."""
        self._autopipe_device = device
        for name in names:
            if name in self._buffers:
                self._buffers[name] = self._buffers[name].to(device)  # type: ignore[union-attr]  # a tensor

    def seed(self, where: tuple[int, int, int]) -> None:
        """Set (run seed, minibatch, microbatch), which seed the random draws of the next forward."""
        self.__dict__["_autopipe_draws"] = where  # nn.Module's own assignment is slow, and this runs in each forward

    def draw_from_generator(self) -> None:
        """Draw from torch's generator as it is: ``autopipe run`` ships its state."""
        self._autopipe_draws = None


def _is_stateless(module: nn.Module) -> bool:
    return not (module._modules or module._parameters or module._buffers)


def _place(stage: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the parent container of ``path`` in the stage, created if needed, and the last name of the path."""
    *parents, name = path.split(".")
    owner = stage
    for parent in parents:
        child = owner._modules.get(parent)
        if child is None:
            child = owner._modules[parent] = Container()
        owner = child
    return owner, name


def _register(owner: nn.Module, name: str, tensor: torch.Tensor, persistent: bool) -> None:
    """Register a tensor. ``register_buffer`` would reject a name that is also the name of a method."""
    if isinstance(tensor, nn.Parameter):
        owner._parameters[name] = tensor
        return
    owner._buffers[name] = tensor
    if not persistent:
        owner._non_persistent_buffers_set.add(name)


def draw(stage: Stage, position: int, count: int = 1) -> contextlib.AbstractContextManager[None]:
    """Seed the call inside by its position in the complete model; see ``autopipe.draws``."""
    where = stage._autopipe_draws
    return contextlib.nullcontext() if where is None else draws.at(where, position, count)


def opaque_call(stage: Stage, position: int) -> contextlib.AbstractContextManager[None]:
    """Seed the call of an opaque module inside, for torch, Python and numpy."""
    where = stage._autopipe_draws
    return contextlib.nullcontext() if where is None else draws.inside(where, position)


def recomputed(unit: Callable[..., Any], *values: Any) -> Any:
    """Call ``unit(*values)``, which the backward calls again instead of keeping its activations.

    The autograd graph is that of the first call, so gradients add up in the same order as without. The caller of the
    backward seeds the stage and exchanges its buffers first (``runtime.stage_runner``). Random draws are seeded by
    their position, so the state of the generators need not be stored.
    """
    return checkpoint(unit, *values, use_reentrant=False, preserve_rng_state=False)


def device_of(stage: Stage) -> torch.device:
    """Return the device of the stage."""
    return stage._autopipe_device

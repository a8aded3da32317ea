"""The user's model while it is recorded: fake tensors in place of its own, and everything restored afterwards.

A fake tensor has a shape and no data. So recording a model changes no weight, allocates no memory and draws no random
numbers. The fakes stand in the model's own dictionaries. After the ``with`` block the model is as before, including
attributes that its forward assigned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy

from autopipe.errors import TraceError
from autopipe.trace.record.caches import Caches
from autopipe.trace.record.fakes import fake_of
from autopipe.trace.record.model_snapshot import REGISTRIES, ModelSnapshot


def first_names(model: nn.Module) -> tuple[dict[int, str], dict[str, str]]:
    """Return id of a parameter or buffer -> its first name, and other name -> first name for the tied ones."""
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for entries in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in entries:
            first = names.setdefault(id(tensor), name)
            if first != name:
                aliases[name] = first
    return names, aliases


class FakedModel:
    """A context in which the model's tensors are fake. ``state``: id of a fake -> first name of what it stands for.

    ``plain``: id of a fake -> (name, tensor) for tensors that are plain attributes, neither parameter nor buffer.
    ``of_real``: id of a real tensor -> its fake.
    """

    def __init__(self, model: nn.Module, mode: FakeTensorMode, device: torch.device) -> None:
        self.model, self.mode, self.device = model, mode, device
        self.names, self.aliases = first_names(model)
        self.state: dict[int, str] = {}
        self.plain: dict[int, tuple[str, Tensor]] = {}
        self.of_real: dict[int, Tensor] = {}
        self.fake: dict[str, Tensor] = {}  # first name -> fake
        self.modules = list(model.named_modules())
        self.snapshot = ModelSnapshot(model)
        self.caches = Caches(model)

    def __enter__(self) -> FakedModel:
        try:
            self._fake_tensors()
        except BaseException:
            self.snapshot.restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.snapshot.restore()
        self.caches.restore()

    def _fake_tensors(self) -> None:
        for module in self.model.modules():
            registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for registry in registries:
                for key, tensor in list(registry.items()):
                    if tensor is not None:
                        registry[key] = self._registered(tensor)
        for path, module in self.model.named_modules():
            for key, value in list(vars(module).items()):
                if key in REGISTRIES or key.endswith("_hooks"):
                    continue
                name = f"{path}.{key}" if path else key
                if isinstance(value, Tensor):
                    vars(module)[key] = self._attribute(value, name)
                elif type(value) in (list, tuple):
                    if any(isinstance(item, Tensor) for item in value):
                        fakes = [self._attribute(item, f"{name}.{i}") for i, item in enumerate(value)]
                        vars(module)[key] = type(value)(fakes)
                elif type(value) is dict and any(isinstance(item, Tensor) for item in value.values()):
                    vars(module)[key] = {k: self._attribute(item, f"{name}.{k}") for k, item in value.items()}

    def _registered(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self.of_real:
            return self.of_real[id(tensor)]
        name = self.names[id(tensor)]
        if is_lazy(tensor):
            raise TraceError(
                f"parameter {name} has no shape yet (a lazy module)",
                remedy="run the model on one batch in build_model before returning it",
            )
        fake = self._convert(tensor)
        self.state[id(fake)] = name
        self.of_real[id(tensor)] = self.fake[name] = fake
        return fake

    def _convert(self, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return fake_of(self.mode, tensor)
        with self.mode:  # a model built without memory is recorded as if it were on the device of the batch
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake

    def _attribute(self, value: Any, name: str) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        if id(value) in self.of_real:
            return self.of_real[id(value)]
        if value.requires_grad:
            return value  # an error where it is used: see ``TensorNodes.constant``
        fake = self._convert(value)
        self.plain[id(fake)] = name, value
        self.of_real[id(value)] = fake
        return fake

    def unfaked(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the user's model has its own tensors."""
        return self.snapshot.restored()

    def is_parameter(self, value: Tensor) -> bool:
        """Return whether a tensor stands for a parameter of the model."""
        return id(value) in self.state and isinstance(value, nn.Parameter)

    def constant_buffers(self) -> Mapping[str, Tensor]:
        """Return the fakes of buffers, by first name, which nothing but forward and loss may write."""
        return {name: fake for name, fake in self.fake.items() if not isinstance(fake, nn.Parameter)}

    def bind_buffer(self, name: str, value: Tensor) -> None:
        """Bind a buffer to a new value, under all of its names."""
        for module in self.model.modules():
            for key, buffer in module._buffers.items():
                if buffer is self.fake[name]:
                    module._buffers[key] = value

    def new_parameters(self) -> Mapping[str, Tensor]:
        """Return name -> new value of the parameters that the forward bound to a tensor that it created."""
        now = self.model.named_parameters(remove_duplicate=False)
        return {name: value for name, value in now if id(value) not in self.state}

    def reassigned_buffers(self) -> Mapping[str, Tensor]:
        """Return first name -> new value of the buffers that the forward bound to another tensor."""
        if not any(module._buffers for _, module in self.modules):
            return {}
        tensors: dict[str, Tensor] = {}
        for name, now in self.model.named_buffers(remove_duplicate=False):
            first = self.aliases.get(name, name)
            if first in self.fake and now is not self.fake[first]:
                tensors.setdefault(first, now)
        return tensors

"""The user's model while it is followed: its tensors lent out as fake ones, and everything put back afterwards.

Fake tensors have a shape and no data, so following a model touches no weight, allocates nothing and draws nothing.
They stand in the model's own dictionaries while it runs; behind the ``with`` block the model is what it was before,
including what its forward wrote to its attributes.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy

from autopipe.errors import TraceError
from autopipe.trace.record.caches import Caches
from autopipe.trace.record.containers import CONTAINERS, copied, refill

PYTHONS, NUMPYS = "Python's random", "numpy.random"  # generators that are not torch's
_REGISTRIES = ("_parameters", "_buffers", "_modules")


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


class Snapshot:
    """Every module's attributes, containers one level deep, and the random states; ``restore`` puts them back."""

    def __init__(self, model: nn.Module) -> None:
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        for module in model.modules():
            attributes = vars(module)
            self._attributes.append((attributes, dict(attributes)))
            for value in attributes.values():
                if isinstance(value, CONTAINERS):
                    self._containers.append((value, copied(value)))
        self._random = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def random_drawn(self) -> str:
        """Name Python's or numpy's generator where it was drawn from since the snapshot, else ""."""
        if random.getstate() != self._random[2]:
            return PYTHONS
        return NUMPYS if self.numpy_drawn() else ""

    def numpy_drawn(self) -> bool:
        """Tell whether numpy's generator was drawn from since the snapshot."""
        now: Any = np.random.get_state()
        before: Any = self._random[1]
        return now[2:] != before[2:] or not np.array_equal(now[1], before[1])

    def changed(self, model: nn.Module) -> Iterator[tuple[str, str, Any, Any]]:
        """Give (path, attribute, value before, value now) of every plain attribute that was rebound."""
        for (path, module), (attributes, before) in zip(model.named_modules(), self._attributes, strict=False):
            if vars(module) is not attributes:
                continue
            for name, value in attributes.items():
                if name not in _REGISTRIES and before.get(name, _ABSENT) is not value:
                    yield path, name, before.get(name), value

    @contextlib.contextmanager
    def returned(self) -> Iterator[None]:
        """Put the attributes back for a while; behind the block they are as they were before it."""
        lent = [(attributes, dict(attributes)) for attributes, _ in self._attributes]
        contents = [(container, copied(container)) for container, _ in self._containers]
        self._put_back(self._containers, self._attributes)
        try:
            yield
        finally:
            self._put_back(contents, lent)

    @staticmethod
    def _put_back(containers: list[tuple[Any, Any]], attributes: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        for container, before in (*containers, *attributes):
            refill(container, before)

    def restore(self) -> None:
        """Put everything back, in the same dictionaries and lists."""
        self._put_back(self._containers, self._attributes)
        torch.set_rng_state(self._random[0])
        np.random.set_state(self._random[1])
        random.setstate(self._random[2])


_ABSENT = object()


class Borrowed:
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
        self.snapshot = Snapshot(model)
        self.caches = Caches(model)

    def __enter__(self) -> Borrowed:
        try:
            self._lend()
        except BaseException:
            self.snapshot.restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.snapshot.restore()
        self.caches.restore()

    def _lend(self) -> None:
        for module in self.model.modules():
            registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for registry in registries:
                for key, tensor in list(registry.items()):
                    if tensor is not None:
                        registry[key] = self._registered(tensor)
        for path, module in self.model.named_modules():
            for key, value in list(vars(module).items()):
                if key in _REGISTRIES or key.endswith("_hooks"):
                    continue
                name = f"{path}.{key}" if path else key
                if isinstance(value, Tensor):
                    vars(module)[key] = self._lent(value, name)
                elif type(value) in (list, tuple):
                    if any(isinstance(item, Tensor) for item in value):
                        lent = [self._lent(item, f"{name}.{i}") for i, item in enumerate(value)]
                        vars(module)[key] = type(value)(lent)
                elif type(value) is dict and any(isinstance(item, Tensor) for item in value.values()):
                    vars(module)[key] = {k: self._lent(item, f"{name}.{k}") for k, item in value.items()}

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
            return self.mode.from_tensor(tensor, static_shapes=True)
        with self.mode:  # a model built without memory is followed as if it lay where the batch lies
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake

    def _lent(self, value: Any, name: str) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        if id(value) in self.of_real:
            return self.of_real[id(value)]
        if value.requires_grad:
            return value  # said so where it is used
        fake = self._convert(value)
        self.plain[id(fake)] = name, value
        self.of_real[id(value)] = fake
        return fake

    def returned(self) -> contextlib.AbstractContextManager[None]:
        """Give the user's model its own tensors for a while."""
        return self.snapshot.returned()

    def reassigned_buffers(self) -> Mapping[str, Tensor]:
        """Return first name -> new value of the buffers that the forward bound to another tensor."""
        tensors: dict[str, Tensor] = {}
        for name, now in self.model.named_buffers(remove_duplicate=False):
            first = self.aliases.get(name, name)
            if first in self.fake and now is not self.fake[first]:
                tensors.setdefault(first, now)
        return tensors

"""The user's model while its Python runs for every microbatch: what it sets stays as it left it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autopipe.errors import TraceError
from autopipe.trace.record.faked_model import FakedModel, first_names
from autopipe.trace.record.values import version_of
from autopipe.trace.tape.backward import has_hooks, share_hooks


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of each module once, as ``named_modules`` does, in a fraction of its time."""
    every: dict[int, tuple[str, nn.Module]] = {}
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in every:
            continue
        every[id(module)] = path, module
        below = module._modules
        if below:
            start = f"{path}." if path else ""
            waiting += [(start + name, part) for name, part in reversed(below.items()) if part is not None]
    return list(every.values())


class LiveModel(FakedModel):
    """As ``FakedModel``, but entered again and again: only registered tensors are replaced, and only they come back."""

    def __init__(self, model: nn.Module, mode: FakeTensorMode, device: torch.device) -> None:
        self.model, self.mode, self.device = model, mode, device
        self.names: dict[int, str] = {}
        self.aliases: dict[str, str] = {}
        self.state: dict[int, str] = {}
        self.plain: dict[int, tuple[str, Tensor]] = {}
        self.of_real: dict[int, Tensor] = {}
        self.fake: dict[str, Tensor] = {}
        self.modules: list[tuple[str, nn.Module]] = []  # of the run of the moment
        self.hooked = False  # Python of the user runs in the backward pass
        self._real: dict[str, Tensor] = {}  # first name -> tensor
        self._known: list[tuple[int, str, int, int]] | None = None  # what is registered, and how often it was written
        self._registered_now: list[tuple[dict[str, Any], str, Tensor]] = []
        self._flat: list[tuple[dict[str, Any], list[Any]]] = []  # weights of recurrent layers, once more

    def __enter__(self) -> LiveModel:
        self.modules = modules_of(self.model)
        every: Any = torch.nn.modules.module
        if every._has_any_global_hook():
            raise TraceError("a hook of all modules (torch.nn.modules.module) is set")
        self._registered_now = [
            (registry, key, tensor)
            for _, module in self.modules
            for registry in (module._parameters, module._buffers)
            for key, tensor in registry.items()
            if tensor is not None and not isinstance(tensor, FakeTensor)
        ]
        now = [(id(registry), key, id(tensor), version_of(tensor)) for registry, key, tensor in self._registered_now]
        if self._known is not None and now != self._known:
            changed = next((key for _, key, *_ in {*now} ^ {*self._known}), "")
            raise TraceError(f"the parameter or buffer {changed} is written or replaced outside of forward and loss")
        self._known = now
        if not self.names:
            self._begin()
        self.hooked = has_hooks(self.modules)
        for tensor in self._real.values():
            fake = self.of_real[id(tensor)]
            self.hooked |= share_hooks(tensor, fake)
            if fake.requires_grad != tensor.requires_grad:
                fake.requires_grad_(tensor.requires_grad)
        self._flat = [
            (vars(module), module._flat_weights) for _, module in self.modules if isinstance(module, nn.RNNBase)
        ]
        for registry, key, tensor in self._registered_now:
            registry[key] = self.of_real[id(tensor)]
        for attributes, weights in self._flat:
            attributes["_flat_weights"] = [None if w is None else self.of_real.get(id(w), w) for w in weights]
        return self

    def forget_writes(self) -> None:
        """Accept what was written to parameters and buffers since the last run."""
        self._known = None

    def _begin(self) -> None:
        self.names, self.aliases = first_names(self.model)
        for table in (self.state, self.of_real, self.fake, self._real):
            table.clear()
        for _, _, tensor in self._registered_now:
            self._registered(tensor)
            self._real.setdefault(self.names[id(tensor)], tensor)
        for unregistered in self.names.keys() - set(map(id, self._real.values())):
            del self.names[unregistered]  # a fake that an earlier forward registered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for registry, key, tensor in self._registered_now:
            if key in registry:
                registry[key] = tensor
        for attributes, weights in self._flat:
            attributes["_flat_weights"] = weights
        self.plain.clear()
        for name, tensor in self._real.items():
            fake = self.fake[name]
            if not fake.is_leaf:  # a buffer that was written with a gradient
                self.names.clear()  # all are faked again
            elif fake.requires_grad != tensor.requires_grad:
                tensor.requires_grad_(fake.requires_grad)
        real = set(map(id, self._real.values()))
        for other in self.of_real.keys() - real:
            del self.of_real[other]

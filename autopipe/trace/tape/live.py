"""The user's model while its Python runs for every microbatch, and between two minibatches.

What it sets stays as it left it.
"""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autopipe.errors import AutopipeError, TraceError
from autopipe.trace.record.faked_model import FakedModel, first_names
from autopipe.trace.record.leaves import CONTAINERS
from autopipe.trace.record.values import version_of
from autopipe.trace.state.users_functions import setting_hook
from autopipe.trace.tape.backward import has_hooks, share_hooks
from autopipe.workload import Workload
from autopipe.workload.hooks.optimizers import is_of_torch

_HALF = "fp16"


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


def settings_of(layer: nn.Module) -> str:
    """Return the settings of a layer of torch as text, with the modes of its parts."""
    return f"{layer!r} {[part.training for part in layer.modules()]}"


def settings_of_layers(model: nn.Module) -> dict[str, str]:
    """Return the settings of the layers of torch by path."""
    layers = ((path, module) for path, module in modules_of(model) if type(module).__module__.startswith("torch."))
    return {path: settings_of(layer) for path, layer in layers if not isinstance(layer, CONTAINERS)}


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
        self._look_for_changes()
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

    def _look_for_changes(self) -> None:
        now = [(id(registry), key, id(tensor), version_of(tensor)) for registry, key, tensor in self._registered_now]
        if self._known is not None and now != self._known:
            changed = next((key for _, key, *_ in {*now} ^ {*self._known}), "")
            raise TraceError(
                f"the parameter or buffer {changed} is written or replaced outside of forward and loss",
                remedy="write it in the forward or the loss, or pass the value with the batch",
            )
        self._known = now

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
        self._put_real()
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

    def _put_real(self) -> None:
        for registry, key, tensor in self._registered_now:
            if key in registry:
                registry[key] = tensor
        for attributes, weights in self._flat:
            attributes["_flat_weights"] = weights


class Steps:
    """The ``after_step`` and ``scheduler`` hooks between two minibatches, without weights.

    They may set what the next forward reads. Their own effects on a training are left to the ranks. ``why_not``: why
    what they do cannot be known; "" if it can.
    """

    def __init__(self, workload: Workload, model: nn.Module, *, varies: bool) -> None:
        """Build them, as a plain loop does before its first minibatch. ``varies``: the model may read their state."""
        self._workload, self._model, self._count = workload, model, 0
        self.scheduler: Any = None
        self.has_hook = "after_step" in workload.hooks and (varies or bool(setting_hook(workload, model, None)))
        self.why_not = ""
        try:
            optimizer = workload.optimizer([*model.named_parameters()])
            self.scheduler = None if optimizer is None else workload.scheduler(optimizer)
        except Exception as error:
            self.why_not = f"the optimizer or the scheduler fails without the weights ({type(error).__name__})"
            return
        if optimizer is not None and not is_of_torch(optimizer):
            self.why_not = "the optimizer is not one of torch's, or calls functions of yours"
            return
        if workload.spec.precision == _HALF and (self.has_hook or self.scheduler is not None):
            if varies or self.has_hook or optimizer is None or not is_of_torch(optimizer, self.scheduler):
                self.why_not = "in fp16, only the ranks know after which minibatches the scheduler and after_step run"
            self.scheduler = None  # one of torch's calls nothing of the user's, and the model reads nothing of it

    def run(self) -> None:
        """Run the hooks after a minibatch. Raises: TraceError if they read the values of parameters, or fail."""
        step, self._count = self._count, self._count + 1
        try:
            if self.has_hook:
                self._run_hook(step)
            if self.scheduler is not None:
                with warnings.catch_warnings():  # torch misses the step of the optimizer
                    warnings.simplefilter("ignore")
                    self.scheduler.step()
        except Exception as error:
            what = error.what if isinstance(error, AutopipeError) else f"{type(error).__name__}: {error}"
            raise TraceError(
                f"the scheduler or after_step fails without the values of parameters: {what}",
                remedy="do not read them there, or do not let the hook set what the forward reads",
            ) from error

    def _run_hook(self, step: int) -> None:
        """Call ``after_step`` with fakes of the parameters; it may freeze some."""
        named = [*self._model.named_parameters()]
        with FakeTensorMode(allow_non_fake_inputs=True):  # without symbols: no number of a fake is known
            fakes = [
                nn.Parameter(torch.empty_strided(p.shape, p.stride(), dtype=p.dtype), requires_grad=p.requires_grad)
                for _, p in named
            ]
            self._workload.after_step([(name, fake) for (name, _), fake in zip(named, fakes, strict=True)], step)
        for (_, parameter), fake in zip(named, fakes, strict=True):
            if parameter.requires_grad != fake.requires_grad:
                parameter.requires_grad_(fake.requires_grad)

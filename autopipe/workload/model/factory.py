"""``ModelFactory``: build the user's model with the same initial weights every time; the modes of its modules."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from autopipe.draws import exclusive
from autopipe.errors import ModelFileError, counted
from autopipe.ir.initial_values import InitialValues
from autopipe.workload.batches.isolation import seeded
from autopipe.workload.hooks.own_loss import OwnLoss
from autopipe.workload.model import partial
from autopipe.workload.model.building import Builder, forward_names
from autopipe.workload.model.digests import initial_values
from autopipe.workload.model.partial import ZeroedMemory

# Build a model without memory for its parameters, whose values are loaded from a file afterwards.
#
# Each parameter is allocated and then replaced by one on the ``meta`` device, so that at most the parameters of one
# module exist at a time. Buffers stay real: the build computes tables and masks, and files do not contain
# non-persistent buffers.
#
# The initialization of a parameter on ``meta`` draws no random numbers, so a *random* buffer differs from that of a
# real build. ``shifted`` reveals such buffers: it draws extra numbers with every parameter, and only they change.
#
# Source: the idea of ``init_empty_weights`` of Hugging Face accelerate. Unlike there, tied parameters stay tied.

_SHOWN = 3  # modules that a note names


@contextlib.contextmanager
def parameters_without_memory(*, shifted: bool = False) -> Iterator[None]:
    """Register every parameter of modules of this thread on the ``meta`` device.

    One thread at a time may be in the block; other threads are not affected.
    """
    register = nn.Module.register_parameter
    replaced = WeakTensorKeyDictionary()
    builder = threading.get_ident()

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        other_thread = threading.get_ident() != builder
        if other_thread or parameter is None or parameter.is_meta or type(parameter) is not nn.Parameter:
            register(module, name, parameter)
            return
        if shifted:
            torch.rand(3)
        if parameter not in replaced:
            replaced[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, replaced[parameter])

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class ModelFactory:
    """Builds the model of a workload, and knows the arguments of its forward."""

    def __init__(self, builder: Builder, own_loss: OwnLoss, seed: int) -> None:
        self.builder = builder
        self._own_loss = own_loss  # becomes a child of the model if it has parameters
        self._seed = seed
        self.notes: tuple[str, ...] = ()  # on the last build: modes, uninitialized memory
        self.initial = InitialValues()  # of the first complete build

    def build(
        self, *, empty: bool = False, shifted: bool = False, part: partial.PartialBuild | None = None
    ) -> nn.Module:
        """Build the model with the initial weights of ``torch.manual_seed(seed)``, in the modes it trains in.

        ``empty``: allocate no memory for the parameters, which are loaded from a file later. ``shifted``: draw extra
        random numbers meanwhile; see ``workload.model.factory``. ``part``: allocate only some of the parameters.

        Raises: ModelFileError if the user's code fails; NotDivisibleError from ``part``.
        """
        build = partial.PartialBuild() if part is None else part
        registering = parameters_without_memory(shifted=shifted) if empty else build.active()
        with seeded(self._seed), registering, ZeroedMemory(untouched=empty or part is not None) as memory:
            model = self.builder.build()
            uninitialized = memory.note(model)
            self.forward_names = forward_names(model)
            model, modes = for_training(model)
            self.notes = tuple(filter(None, (modes, uninitialized)))
            original = self.builder.value if isinstance(self.builder.value, nn.Module) else None
            self._own_loss.attach(model, original)
            if part is None and not empty and not self.initial.digests:
                self.initial = initial_values(model, build.numbers(model))
        return model

    @functools.cached_property
    def forward_names(self) -> tuple[str, ...]:
        """The parameter names of the model's forward. Builds the model if its class is not known."""
        value = self.builder.value
        if isinstance(value, nn.Module) or (isinstance(value, type) and issubclass(value, nn.Module)):
            return forward_names(value)
        with exclusive(), torch.random.fork_rng(devices=()):
            try:
                with torch.device("meta"):  # only the signature is needed
                    return forward_names(self.builder.build())
            except ModelFileError:
                return forward_names(self.builder.build())


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

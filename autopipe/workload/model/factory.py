"""``ModelFactory``: build the user's model with the same initial weights every time."""

from __future__ import annotations

import functools

import torch
from torch import nn

from autopipe.draws import exclusive
from autopipe.errors import ModelFileError
from autopipe.ir.initial_values import InitialValues
from autopipe.workload.batches.isolation import seeded
from autopipe.workload.hooks.own_loss import OwnLoss
from autopipe.workload.model import partial
from autopipe.workload.model.building import Builder, forward_names
from autopipe.workload.model.digests import initial_values
from autopipe.workload.model.empty import parameters_without_memory
from autopipe.workload.model.modes import for_training
from autopipe.workload.model.uninitialized import ZeroedMemory


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
        random numbers meanwhile; see ``workload.model.empty``. ``part``: allocate only some of the parameters.

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

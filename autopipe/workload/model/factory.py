"""``ModelFactory``: build the user's model with the same initial weights every time; the modes of its modules."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from autopipe.draws import exclusive
from autopipe.errors import ModelFileError, counted
from autopipe.ir.initial_values import InitialValues
from autopipe.workload.batches.isolation import seeded
from autopipe.workload.hooks.own_loss import OwnLoss
from autopipe.workload.model import partial
from autopipe.workload.model.building import Builder, forward_names
from autopipe.workload.model.digests import initial_values
from autopipe.workload.model.partial import ZeroedMemory
from autopipe.workload.model.placeholders import is_placeholder

_SHOWN = 3  # modules that a note names


class ModelFactory:
    """Builds the model of a workload, and knows the arguments of its forward."""

    def __init__(self, builder: Builder, own_loss: OwnLoss, seed: int) -> None:
        self.builder = builder
        self._own_loss = own_loss  # becomes a child of the model if it has parameters
        self._seed = seed
        self.notes: tuple[str, ...] = ()  # on the last build: modes, uninitialized memory
        self.initial = InitialValues()  # of the first complete build
        # instances in the file, with their own attributes and those of the model that they stand for, see ``bind``
        self._bound: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        self._left_out: tuple[str, ...] = ()  # see ``without``
        self._wanted: frozenset[int] | None = None  # the numbers of the parameters besides those that are left out
        self.is_large = False  # it is known that a complete build would exceed ``size_limits.FIRST_BYTES``

    def build(
        self, *, empty: bool = False, shifted: bool = False, part: partial.PartialBuild | None = None
    ) -> nn.Module:
        """Build the model with the initial weights of ``torch.manual_seed(seed)``, in the modes it trains in.

        ``empty``: allocate no memory for the parameters. Each of them is allocated and then replaced by one on the
        ``meta`` device, so that at most the parameters of one module exist at a time; tied parameters stay tied.
        Buffers stay real: the build computes tables and masks. No random numbers are drawn for parameters, so a
        *random* buffer differs from that of a complete build: ``shifted`` reveals such buffers. ``part``: allocate
        only some of the parameters.

        Raises: ModelFileError if the user's code fails; NotDivisibleError from ``part``.
        """
        wanted = None if empty else self._wanted
        build = partial.PartialBuild(wanted, empty=empty, shifted=shifted) if part is None else part
        memory = ZeroedMemory(untouched=not build.is_complete)
        with seeded(self._seed), build.active(), memory, self._unbound():
            model = self.builder.build()
            uninitialized = memory.note(model)
            self.forward_names = forward_names(model)
            model, modes = for_training(model)
            self.notes = tuple(filter(None, (modes, uninitialized)))
            original = self.builder.value if isinstance(self.builder.value, nn.Module) else None
            self._own_loss.attach(model, original)
        if self._left_out:
            self._leave_out(model, build)
            if part is None:
                build.refuse_derived(model, lambda _, tensor: not is_placeholder(tensor))
        if build.is_complete and not self.initial.digests:
            self.initial = initial_values(model, build.numbers(model))
        elif not self.initial.numbers:
            self.initial = InitialValues(numbers=build.numbers(model))
        return model

    @contextlib.contextmanager
    def without(self, paths: tuple[str, ...]) -> Iterator[None]:
        """Build the model without these modules in this block. The others keep their names and initial weights.

        A build raises NotDivisibleError if a module that stays is computed from one that is left out.
        """
        self._left_out = paths
        try:
            with exclusive():
                self.build(empty=True)  # finds ``_wanted``
            yield
        finally:
            self._left_out, self._wanted = (), None

    def _leave_out(self, model: nn.Module, build: partial.PartialBuild) -> None:
        before = build.numbers(model)
        for path in self._left_out:
            parent, _, name = path.rpartition(".")
            del model.get_submodule(parent)._modules[name]
        if self._wanted is None:
            lost = {*before.values()} - {*build.numbers(model).values()}
            self._wanted = frozenset(range(build.count)) - lost

    def bind(self, model: nn.Module) -> None:
        """Let instances of the file have the attributes of a model and its loss, of which those are copies.

        What other functions of the file change of the instances is then changed in the model.
        """
        value = self.builder.value
        copies = [(value, model)] if isinstance(value, nn.Module) else []
        if (of_loss := self._own_loss.copied(model)) is not None:
            copies.append(of_loss)
        for instance, own in copies:
            parts = [(part, vars(own.get_submodule(path))) for path, part in instance.named_modules()]
            self._bound += [(part, vars(part), attributes) for part, attributes in parts]
        for part, _, attributes in self._bound:
            part.__dict__ = attributes

    @contextlib.contextmanager
    def _unbound(self) -> Iterator[None]:
        for part, own, _ in self._bound:
            part.__dict__ = own
        try:
            yield
        finally:
            for part, _, attributes in self._bound:
                part.__dict__ = attributes

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

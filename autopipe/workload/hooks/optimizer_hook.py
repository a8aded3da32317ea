"""Call the user's optimizer hook for the parameters of one stage, and check that it selects as in the whole model.

A hook may select only some parameters (adapters, the head). A stage without any of them then needs no optimizer, and
the hook may fail there on an empty list of parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from autopipe.draws import exclusive
from autopipe.errors import AutopipeError, ModelFileError, counted
from autopipe.workload.hooks.hook import Hook
from autopipe.workload.hooks.optimizers import Named, make_optimizer, stepped


class OptimizerHook:
    """The optimizer hook of a workload."""

    def __init__(self, hook: Hook, lr: float | None, build: Callable[..., nn.Module]) -> None:
        self.hook = hook
        self.lr = lr  # of --lr; None for the hook's own
        self._build = build  # builds the model; with ``empty=True`` without memory for its parameters

    def optimizer(self, trained: Named) -> Optimizer | None:
        """Return the optimizer of some of the model's parameters; None if the hook selects none of them.

        Raises: ModelFileError if the hook also fails on the whole model, steps parameters that were not passed to it,
        or selects a parameter in a stage but not in the whole model, or the other way round.
        """
        try:
            optimizer = make_optimizer(self.hook, trained, self.lr)
        except ModelFileError as error:
            names = {name for name, _ in trained}
            if not isinstance(error.__cause__, Exception) or names >= self._of_model.keys():
                raise
            if self._chosen.isdisjoint(names):
                return None
            raise self._failing_on_a_part(error, trained) from error
        self._refuse_foreign_parameters(optimizer, trained)
        taken = {id(parameter) for parameter in stepped(optimizer)}
        if len(taken) < len(trained):
            self._refuse_inconsistent_choice({name for name, parameter in trained if id(parameter) in taken}, trained)
        return optimizer if taken else None

    def chosen(self) -> dict[str, Parameter]:
        """Return the parameters that the hook selects from the whole model. Raises: ModelFileError if it fails."""
        return {name: parameter for name, parameter in self._of_model.items() if name in self._chosen}

    @functools.cached_property
    def _of_model(self) -> dict[str, Parameter]:
        return trained_parameters(self._build)

    @functools.cached_property
    def _chosen(self) -> frozenset[str]:
        """The names of the parameters that the hook selects from the whole model.

        Raises: ModelFileError if it fails on the whole model too.
        """
        named = self._of_model
        try:
            optimizer = make_optimizer(self.hook, list(named.items()), self.lr)
        except ModelFileError:
            if not any(parameter.is_meta for parameter in named.values()):
                raise
            with exclusive():
                named = {n: p for n, p in self._build().named_parameters() if p.requires_grad}
            optimizer = make_optimizer(self.hook, list(named.items()), self.lr)
        names = {id(parameter): name for name, parameter in named.items()}
        return frozenset(names[id(p)] for p in stepped(optimizer) if id(p) in names)

    def _refuse_foreign_parameters(self, optimizer: Optimizer, trained: Named) -> None:
        known = {id(parameter) for _, parameter in trained}
        others = [parameter for parameter in stepped(optimizer) if id(parameter) not in known]
        if others:
            raise ModelFileError(
                f"{self.hook.label} returned an optimizer with {counted(len(others), 'parameter')} that were not "
                f"passed to it, the first of shape {list(others[0].shape)}: they come from another source, such as a "
                "global model",
                where=self.hook.path,
                remedy="take the parameters from the argument of the hook: pairs of name and parameter",
            )

    def _failing_on_a_part(self, error: ModelFileError, trained: Named) -> ModelFileError:
        return ModelFileError(
            f"{error.what}. The hook was called with the {counted(len(trained), 'parameter')} of one stage or replica "
            f"({trained[0][0]} to {trained[-1][0]}); it does not fail with those of the whole model",
            where=error.where,
            remedy="each stage has its own optimizer, and so has each of its replicas without --shard-optimizer never: "
            "omit groups, and inner optimizers, that have no parameters there",
        )

    def _refuse_inconsistent_choice(self, taken: set[str], trained: Named) -> None:
        known = {name for name, _ in trained} & self._of_model.keys()
        wanted = known & self._chosen
        differing = sorted((taken & known) ^ wanted)
        if differing:
            in_stage, in_model = ("omits", "selects") if differing[0] in wanted else ("selects", "omits")
            raise ModelFileError(
                f"{self.hook.label} does not choose parameters by name: it {in_stage} {differing[0]} when called with "
                f"the parameters of one stage, and {in_model} it when called with those of the whole model",
                where=self.hook.path,
                remedy="choose parameters by their names or shapes, not by their number or their position in the list",
            )


def trained_parameters(build: Callable[..., nn.Module]) -> dict[str, Parameter]:
    """Return the trained parameters of a model; on ``meta`` if the model can be built without memory for them."""
    with exclusive():
        try:
            model = build(empty=True)
        except AutopipeError:
            model = build()
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

"""The user's optimizer hook, called for the parameters of one stage: it must choose there as it does in the model.

A hook may take some parameters only (adapters, the head). Then a stage that has none of them needs no optimizer, and
the hook, which fails there (an empty list of parameters), is not at fault.
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
    """``lr``: of ``--lr``, None for the hook's own. ``build``: the model; with ``empty=True`` without memory."""

    def __init__(self, hook: Hook, lr: float | None, build: Callable[..., nn.Module]) -> None:
        self.hook, self.lr, self._build = hook, lr, build

    def optimizer(self, trained: Named) -> Optimizer | None:
        """Return the optimizer of some of the model's parameters, None where the hook takes none of them.

        Raises: ModelFileError when the hook fails on the whole model too, steps parameters that it was not given, or
        takes other parameters of a stage than it takes of them in the whole model.
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
        self._refuse_strangers(optimizer, trained)
        taken = {id(parameter) for parameter in stepped(optimizer)}
        if len(taken) < len(trained):
            self._refuse_other_choice({name for name, parameter in trained if id(parameter) in taken}, trained)
        return optimizer if taken else None

    def chosen(self) -> dict[str, Parameter]:
        """Return the parameters that the hook takes of the whole model. Raises: ModelFileError where it fails."""
        return {name: parameter for name, parameter in self._of_model.items() if name in self._chosen}

    @functools.cached_property
    def _of_model(self) -> dict[str, Parameter]:
        return trained_parameters(self._build)

    @functools.cached_property
    def _chosen(self) -> frozenset[str]:
        """The names of the parameters that the hook takes when it is given the whole model.

        Raises: ModelFileError where it fails on the whole model too.
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

    def _refuse_strangers(self, optimizer: Optimizer, trained: Named) -> None:
        given = {id(parameter) for _, parameter in trained}
        others = [parameter for parameter in stepped(optimizer) if id(parameter) not in given]
        if others:
            raise ModelFileError(
                f"{self.hook.label} gave an optimizer with {counted(len(others), 'parameter')} that it was not given, "
                f"the first of shape {list(others[0].shape)}: it takes them from elsewhere, such as a global model",
                where=self.hook.path,
                remedy="take the parameters from the argument of the hook: pairs of name and parameter",
            )

    def _failing_on_a_part(self, error: ModelFileError, trained: Named) -> ModelFileError:
        return ModelFileError(
            f"{error.what}. It was given the {counted(len(trained), 'parameter')} of one stage ({trained[0][0]} to "
            f"{trained[-1][0]}), and does not fail on those of the whole model",
            where=error.where,
            remedy="each stage has an optimizer of its own: leave out groups, and inner optimizers, that have no "
            "parameters there",
        )

    def _refuse_other_choice(self, taken: set[str], trained: Named) -> None:
        known = {name for name, _ in trained} & self._of_model.keys()
        wanted = known & self._chosen
        differing = sorted((taken & known) ^ wanted)
        if differing:
            ways = ("leaves out", "takes") if differing[0] in wanted else ("takes", "leaves out")
            raise ModelFileError(
                f"{self.hook.label} does not choose parameters by name: it {ways[0]} {differing[0]} when it is given "
                f"the parameters of one stage, and {ways[1]} it when it is given those of the whole model",
                where=self.hook.path,
                remedy="choose parameters by their names or shapes, not by their number or their place in the list",
            )


def trained_parameters(build: Callable[..., nn.Module]) -> dict[str, Parameter]:
    """Return the parameters of a model that are trained, without memory where it can be built so."""
    with exclusive():
        try:
            model = build(empty=True)
        except AutopipeError:
            model = build()
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

"""``Stepping``: the optimizer and the scheduler, from the user's hooks or by the name of a torch optimizer.

The optimizer hook is called for the parameters of one stage, and must select as in the whole model. A hook may select
only some parameters (adapters, the head). A stage without any of them then needs no optimizer, and the hook may fail
there on an empty list of parameters.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopipe.draws import exclusive
from autopipe.errors import AutopipeError, ModelFileError, counted
from autopipe.ir.profile import WorkloadSpec
from autopipe.workload.hooks.candidates import hook_name
from autopipe.workload.hooks.hook import Hook
from autopipe.workload.hooks.optimizers import (
    Named,
    default_optimizer,
    make_optimizer,
    make_scheduler,
    named_optimizer,
    stepped,
)
from autopipe.workload.target.targets import elsewhere

DEFAULT_OPTIMIZER = "adamw"

_PARTS = {"optimizer": "optim", "scheduler": "schedul"}  # a name with this part resembles that hook


class Stepping:
    """The optimizer and the scheduler of a workload."""

    def __init__(self, hooks: Mapping[str, Hook], name: str, lr: float | None, build: Callable[..., nn.Module]) -> None:
        """``name``: of an optimizer of torch; "" for the hook, else the default. ``build``: builds the whole model."""
        self.optimizer_class = named_optimizer(name or DEFAULT_OPTIMIZER)
        hook = None if name else hooks.get("optimizer")
        self._hook = None if hook is None else _OptimizerHook(hook, lr, build)
        self._scheduler = hooks.get("scheduler")
        self._lr = lr
        self._build = build

    def optimizer(self, named_parameters: Sequence[tuple[str, Parameter]]) -> Optimizer | None:
        """Return the optimizer of some of the parameters; None if none of them is trained.

        Raises: ModelFileError if the user's hook fails, returns another type, or steps other parameters than it steps
        when it is given the whole model.
        """
        trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        if not trained:
            return None
        if self._hook is None:
            return default_optimizer(self.optimizer_class, trained, self._lr)
        return self._hook.optimizer(trained)

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return the learning-rate scheduler of an optimizer; None without a hook.

        Raises: ModelFileError if the user's hook fails or returns a scheduler whose ``step`` needs arguments.
        """
        return None if self._scheduler is None else make_scheduler(self._scheduler, optimizer)

    @property
    def has_scheduler(self) -> bool:
        """Whether there is a ``scheduler`` hook."""
        return self._scheduler is not None

    @property
    def is_customized(self) -> bool:
        """Whether an optimizer hook or a scheduler hook of the user decides how parameters are stepped."""
        return self._hook is not None or self.has_scheduler

    def stepped_parameters(self) -> dict[str, Parameter]:
        """Return the parameters of the model that the optimizer steps; on ``meta`` if the model can be built there.

        Raises: ModelFileError if the optimizer hook fails on them.
        """
        return _trained_parameters(self._build) if self._hook is None else self._hook.chosen()

    @property
    def optimizer_place(self) -> str:
        """``file:line`` of the optimizer hook, or the name of torch's optimizer."""
        return f"torch.optim.{self.optimizer_class.__name__}" if self._hook is None else self._hook.hook.place


class _OptimizerHook:
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
        return _trained_parameters(self._build)

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


def _trained_parameters(build: Callable[..., nn.Module]) -> dict[str, Parameter]:
    """Return the trained parameters of a model; on ``meta`` if the model can be built without memory for them."""
    with exclusive():
        try:
            model = build(empty=True)
        except AutopipeError:
            model = build()
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@dataclass(frozen=True, slots=True)
class Choice:
    """The optimizer and the scheduler of a workload."""

    names: str  # ``AdamW, lr 0.001``; ``net.py:optimizer; scheduler: net.py:scheduler``
    default: str = ""  # why the default optimizer is used; "" if the user chose one
    hint: str = ""  # about an unused function that resembles the scheduler hook; "" without one

    @property
    def note(self) -> str:
        """The choice as a note for the user."""
        default = f" ({self.default})" if self.default else ""
        return f"optimizer: {self.names}{default}{f'; {self.hint}' if self.hint else ''}"


def choice_of(
    module: ModuleType, label: str, spec: WorkloadSpec, hooks: Mapping[str, Hook], fallback: type[Optimizer]
) -> Choice:
    """Return the choice of a workload. ``fallback``: the class that is used without an optimizer hook."""
    default = hint = ""
    if "optimizer" in hooks:
        names, rate = _place("optimizer", label, spec.hooks), spec.lr
    else:
        names, rate = fallback.__name__, spec.lr
        if rate is None:
            rate = _usual_rate(fallback)
        if not spec.optimizer:
            near = _resembling("optimizer", module, hooks)
            default = f"{label} has no `optimizer`"
            default += f"; did you mean {near}? give --optimizer :{near}" if near else ""
    if rate is not None:
        names += f", lr {rate:g}"
    if "scheduler" in hooks:
        names += f"; scheduler: {_place('scheduler', label, spec.hooks)}"
    elif near := _resembling("scheduler", module, hooks):
        hint = f"no scheduler (did you mean {near}? name it `scheduler`)"
    return Choice(names, default, hint)


def _place(name: str, label: str, options: Mapping[str, str]) -> str:
    """Return the file and the name of a hook, without folders. ``options``: the TARGET of each hook that has one."""
    text = options.get(name, f":{name}")
    target = elsewhere(text)
    return f"{label}{text}" if target is None else f"{target.label}:{target.attribute or name}"


def _usual_rate(kind: type[Optimizer]) -> float | None:
    """Return the default learning rate of an optimizer of torch; None if it has none that is a number."""
    parameter = inspect.signature(kind).parameters.get("lr")
    rate = None if parameter is None else parameter.default
    return float(rate) if isinstance(rate, (int, float)) else None


def _resembling(name: str, module: ModuleType, hooks: Mapping[str, Hook]) -> str:
    """Return a function of the file whose name resembles that of a hook, and that no hook calls; "" without one."""
    called: set[str] = set()
    for hook in hooks.values():
        called.update(getattr(getattr(hook.function, "__code__", None), "co_names", ()))
    return hook_name(name, _PARTS[name], module, called)

"""``Stepping``: the optimizer and the scheduler, from the user's hooks or by the name of a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopipe.workload.hooks.hook import Hook
from autopipe.workload.hooks.optimizer_hook import OptimizerHook, trained_parameters
from autopipe.workload.hooks.optimizers import default_optimizer, make_scheduler, named_optimizer

DEFAULT_OPTIMIZER = "adamw"


class Stepping:
    """The optimizer and the scheduler of a workload."""

    def __init__(self, hooks: Mapping[str, Hook], name: str, lr: float | None, build: Callable[..., nn.Module]) -> None:
        """``name``: of an optimizer of torch; "" for the hook, else the default. ``build``: builds the whole model."""
        self.optimizer_class = named_optimizer(name or DEFAULT_OPTIMIZER)
        hook = None if name else hooks.get("optimizer")
        self._hook = None if hook is None else OptimizerHook(hook, lr, build)
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
        return trained_parameters(self._build) if self._hook is None else self._hook.chosen()

    @property
    def optimizer_place(self) -> str:
        """``file:line`` of the optimizer hook, or the name of torch's optimizer."""
        return f"torch.optim.{self.optimizer_class.__name__}" if self._hook is None else self._hook.hook.place

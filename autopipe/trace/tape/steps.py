"""The user's Python between two minibatches, without weights: the ``scheduler`` and ``after_step`` hooks.

They may set what the next forward reads. Their own effects on a training are left to the ranks.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from autopipe.errors import AutopipeError, TraceError
from autopipe.workload import Workload
from autopipe.workload.hooks.optimizers import is_of_torch

_HALF = "fp16"


class Steps:
    """Runs the hooks after each minibatch. ``why_not``: why what they do cannot be known; "" if it can."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        """Build the optimizer and the scheduler, as a plain loop does before its first minibatch."""
        self._workload, self._count = workload, 0
        self._named = [*model.named_parameters()]
        self._scheduler: Any = None
        self.why_not = ""
        try:
            optimizer = workload.optimizer(self._named)
            scheduler = None if optimizer is None else workload.scheduler(optimizer)
        except Exception as error:
            self.why_not = f"the optimizer or the scheduler fails without the weights ({type(error).__name__})"
            return
        if optimizer is not None and not is_of_torch(optimizer):
            self.why_not = "the optimizer is not one of torch's, or calls functions of yours"
        elif scheduler is not None and optimizer is not None and not is_of_torch(optimizer, scheduler):
            self._scheduler = scheduler
        if self.runs_own_code and workload.spec.precision == _HALF:
            self.why_not = "in fp16, only the ranks know after which minibatches the scheduler and after_step run"

    @property
    def runs_own_code(self) -> bool:
        """Whether a step runs code that is not torch's."""
        return self._scheduler is not None or "after_step" in self._workload.hooks

    def run(self) -> None:
        """Run the hooks after a minibatch. Raises: TraceError if they fail without the weights."""
        step, self._count = self._count, self._count + 1
        if not self.runs_own_code:
            return
        try:
            if self._scheduler is not None:
                with warnings.catch_warnings():  # torch misses the step of the optimizer
                    warnings.simplefilter("ignore")
                    self._scheduler.step()
            self._workload.after_step(self._named, step)
        except Exception as error:
            what = error.what if isinstance(error, AutopipeError) else f"{type(error).__name__}: {error}"
            raise TraceError(
                f"the scheduler or after_step fails without the weights: {what}",
                remedy="do not read the values of parameters there, or do not let it set what the forward reads",
            ) from error

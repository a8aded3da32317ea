"""``PlainRuns``: the plain trainings of a comparison.

If the user's Python changes what it does from step to step, it can run only once in a process, over the data as it
reads it. Then each training is made ``Apart``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from autopipe.measure.device import release
from autopipe.runtime.batches.beside import Telling
from autopipe.runtime.context import RunContext
from autopipe.runtime.job import Job, RunDirectory
from autopipe.verify.in_stages import AVERAGE, Gradients, Trained, fresh, same, states_of
from autopipe.verify.joined import JoinedStages
from autopipe.verify.noise import ENLARGED
from autopipe.verify.order import SumOrder
from autopipe.verify.plain import PlainSettings, Subject, plain_training
from autopipe.workload import Workload


class Apart(Protocol):
    """New processes that run the user's Python from its start. Each reads the data itself, in the order of training."""

    def reads(self) -> AbstractContextManager[Telling]:
        """Start the process that reads for the stages, and knows the numbers (``runtime.batches.beside``)."""

    def train(self, settings: PlainSettings) -> Trained:
        """Train the user's model. ``settings``: those of ``check.settings_of`` but for order, rounding and divisors."""


@dataclass(frozen=True, slots=True)
class PlainRuns:
    """Plain runs over the same minibatches."""

    workload: Workload
    run: RunDirectory
    job: Job
    context: RunContext
    items: Iterable[Any]
    # in the order of sums of one process
    settings: PlainSettings
    # step with these gradients in place of its own, so that every step begins at the weights that they led to
    forced: Gradients | None = None
    # where the user's Python runs, if it varies
    apart: Apart | None = None

    def train(self, subject: Subject | None = None, **changes: Any) -> Trained:
        """Train once, with these changes to the settings. ``subject``: None for the user's model."""
        if self.apart is not None and subject is None:
            assert self.forced is None, "a graph that varies is compared only where no step needs other gradients"
            return self.apart.train(replace(self.settings, **changes))
        trained = Trained()

        def keep(step: int, parameters: Mapping[str, Any]) -> None:
            trained.keep(step, parameters)
            for name, parameter in parameters.items() if self.forced is not None else ():
                gradient = self.forced.get((step, name)) if self.forced is not None else None
                parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

        subject = Subject(self.workload, self.device) if subject is None else subject
        before = {name: buffer.detach().clone() for name, buffer in subject.buffers().items()}
        run = plain_training(
            self.workload,
            fresh(self.items),
            replace(self.settings, **changes),
            device=self.device,
            subject=subject,
            on_gradients=keep,
        )
        parameters = {name: parameter.data for name, parameter in subject.parameters.items()}
        moving, aliases = self.context.graph.moving, self.context.graph.aliases
        parameters.update({f"{AVERAGE}{name}": tensor for name, tensor in run.averages.items() if name in moving})
        buffers = subject.buffers()
        changed = (name for name, buffer in before.items() if not same(buffers.get(name), buffer))
        trained.moved = frozenset(aliases.get(name, name) for name in changed)
        trained.states = states_of(run.optimizer, subject.parameters)
        trained.finish(parameters, {aliases.get(n, n): buffer for n, buffer in buffers.items()}, run.losses)
        if self.context.plan.workload.precision == "fp16":
            trained.note_skipped()
        del parameters, buffers, before, run, subject
        release(self.device)
        return trained

    @property
    def device(self) -> torch.device:
        """The device of the runs."""
        return torch.device(self.job.device)

    def in_order(self, order: SumOrder, **changes: Any) -> Trained:
        """Train once in the order of a plan: the user's model, or its stages joined if they share parameters."""
        return self.train(self.joined(shared=False) if order.shared else None, order=order, **changes)

    def joined(self, *, shared: bool) -> JoinedStages:
        """Return the stages joined in one process."""
        return JoinedStages(self.run, self.context, self.workload, self.device, shared=shared)

    def rounded(self, order: SumOrder) -> Trained:
        """Train once in the order of a plan, with other rounding: that of the microbatches in reverse, if possible."""
        if self.apart is not None:  # in reverse, the user's Python would give them other numbers
            return self.in_order(order, enlarged=ENLARGED)
        return self.in_order(order, reverse=True)

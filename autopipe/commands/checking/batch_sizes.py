"""Find the microbatch sizes that the model itself accepts, by running its forward once for each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopipe.draws import exclusive
from autopipe.errors import AutopipeError, RunError, counted
from autopipe.trace.loss.steady import steady
from autopipe.workload import Workload

if TYPE_CHECKING:
    from autopipe.commands.prepared import Prepared


@dataclass(frozen=True, slots=True)
class Refused:
    """A microbatch size that the model does not accept."""

    samples: int
    error: AutopipeError | None  # the model's error, with the user's line; None if its loss is not finite

    @property
    def reason(self) -> str:
        """The message of the model's error."""
        if self.error is None:
            return "its loss is not finite"
        cause = self.error.__cause__
        text = self.error.what if cause is None else f"{type(cause).__name__}: {cause}"
        return text.strip().splitlines()[0]


class PlainModel:
    """The user's model in one process, run forward only. ``model``: its state is left unchanged; None builds one."""

    def __init__(self, workload: Workload, device: str, model: nn.Module | None = None) -> None:
        self._workload, self._device, self._model = workload, torch.device(device), model

    def refuses(self, item: Any, num_parts: int) -> Refused | None:
        """Return the first size among the parts of a minibatch that the model does not accept, or None.

        A size with a loss that is not finite counts as not accepted.
        """
        if self._model is None:
            with exclusive():
                self._model = self._workload.build_model().to(self._device)
        seen: set[int] = set()
        for part in self._workload.split(item, num_parts):
            samples = self._workload.num_samples(part)
            if samples in seen:
                continue
            seen.add(samples)
            leaves = {name: leaf.to(self._device) for name, leaf in self._workload.leaves(part).items()}
            batch = self._workload.with_leaves(part, leaves)
            try:
                with (
                    exclusive(),
                    warnings.catch_warnings(action="ignore"),  # such as for the variance of one sample
                    steady(self._workload, self._model, batch, as_it_is=True),
                    torch.no_grad(),
                    self._workload.explained(part),
                ):
                    loss, _ = self._workload.loss(self._model, batch)
            except AutopipeError as error:
                return Refused(samples, error)
            if not math.isfinite(float(loss)):
                return Refused(samples, None)
        return None


def taken(workload: Workload, model: nn.Module, sizes: Sequence[int]) -> tuple[tuple[int, ...], str]:
    """Return the sizes from the smallest accepted one on, and the reason why smaller ones are not accepted, or "".

    If none is accepted, all are returned: a later step reports the problem.
    """
    plain = PlainModel(workload, "cpu", model)
    why = ""
    for index, size in enumerate(sizes):
        refused = plain.refuses(workload.example_item(size), 1)
        if refused is None:
            return tuple(sizes[index:]), why
        why = why or f"the model does not accept {_microbatch(size)}: {refused.reason}"
    return tuple(sizes), ""


def refusal(prepared: Prepared, item: Any, device: str) -> RunError | None:
    """Return the error for a minibatch with a microbatch that the model does not accept; None if it accepts all.

    The remedy names a number of microbatches that was tried and works.
    """
    plan, workload = prepared.plan, prepared.workload
    model = PlainModel(workload, device)
    refused = model.refuses(item, plan.num_microbatches)
    if refused is None:
        return None
    samples = workload.num_samples(item)
    return RunError(
        f"splitting {counted(samples, 'sample')} into {counted(plan.num_microbatches, 'microbatch')} gives "
        f"{_microbatch(refused.samples)}, which the model does not accept: {refused.reason}",
        where=refused.error.where if refused.error is not None else "",
        remedy=_remedy(model, item, samples, plan.num_microbatches),
    )


def _microbatch(samples: int) -> str:
    return f"a microbatch of {counted(samples, 'sample')}"


def _remedy(model: PlainModel, item: Any, samples: int, planned: int) -> str:
    """Return a remedy: a number of microbatches, smaller than the plan's, with which the model accepts all of them."""
    fewer = {planned - 1, *(planned >> shift for shift in range(1, planned.bit_length()))}
    for count in sorted(fewer - {0}, reverse=True):
        if model.refuses(item, count) is None:
            size = samples // count
            return (
                f"--num-microbatches {count}: the model accepts microbatches of {size} samples; or a larger "
                "--batch-size"
            )
    return (
        f"the model does not accept all {counted(samples, 'sample')} at once either: compare the batch with the model"
    )

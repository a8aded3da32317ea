"""Equality with plain training, tensor by tensor: losses, gradients of every step, weights and buffers at the end.

Gradients are compared as well as weights because an adaptive optimizer hides a gradient that is wrong by a factor.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopipe.runtime.job import Job, RunDirectory
from autopipe.runtime.layout import Layout
from autopipe.runtime.reference import PlainSettings, plain_training
from autopipe.runtime.threads import run_in_threads
from autopipe.schedules import make
from autopipe.trace.patches import as_compiled
from autopipe.workload import Workload

logger = logging.getLogger(__name__)

# float32 sums in another order: the promise where replicas, ties or a global norm change the order
TOLERANCE = 1e-6
# one other order is one sample of the noise; another may be a few times as far off
NOISE_FACTOR = 4.0
# a tensor that came off lightly in that sample may be as far off as others are that did not
USUAL_FACTOR = 16.0
# of the lines that ask whether the model is captured: tried by themselves, and named
_MOST_PLACES, _SHOWN_PLACES = 8, 3


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One parameter or buffer. ``error``: largest difference over steps, relative to the tensor's largest value.

    ``noise``: the same between two plain runs that add up in another order, where that was measured.
    """

    name: str
    error: float
    bitwise: bool
    owner: int
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """``promised``: the result should be equal to the last bit. ``reasons``: why it is not promised.

    ``noise``: what the order of additions alone changes in the middle tensor, measured where bits are not promised: the
    plain loop against itself with its microbatches added up in reverse. An optimizer that divides by the gradient's
    size enlarges it. A tensor whose true gradient is zero is nothing but noise, and excuses no other one.
    ``nonfinite``: what is no finite number, "" where all is finite; then nothing is proven, whatever agrees.
    """

    differences: tuple[TensorDifference, ...]
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    promised: bool
    reasons: tuple[str, ...]
    noise: float = 0.0
    nonfinite: str = ""

    @property
    def bitwise(self) -> bool:
        """Not one bit differs, losses included."""
        return not self.nonfinite and all(d.bitwise for d in self.differences) and self.losses == self.reference_losses

    @property
    def max_relative_error(self) -> float:
        """The largest error of any tensor or loss."""
        losses = [_scalar_error(a, b) for a, b in zip(self.losses, self.reference_losses, strict=True)]
        return max([d.error for d in self.differences] + losses, default=0.0)

    @property
    def equal(self) -> bool:
        """As equal as the definition promises. What is not finite is equal to nothing."""
        if self.nonfinite:
            return False
        if self.promised:
            return self.bitwise
        usual = max(TOLERANCE, USUAL_FACTOR * self.noise)
        losses = zip(self.losses, self.reference_losses, strict=True)
        return all(_scalar_error(a, b) <= usual for a, b in losses) and all(
            d.error <= max(usual, NOISE_FACTOR * d.noise) for d in self.differences
        )


@dataclass(slots=True)
class _Worst:
    """The largest difference seen of each tensor."""

    errors: dict[str, float] = field(default_factory=dict)
    unequal: set[str] = field(default_factory=set)
    nonfinite: list[str] = field(default_factory=list)

    def add(
        self, name: str, ours: torch.Tensor | None, theirs: torch.Tensor | None, *, may_overflow: bool = False
    ) -> None:
        if ours is None or theirs is None:
            same = ours is None and theirs is None
            error = 0.0 if same else float("inf")
        else:
            same = ours.shape == theirs.shape and torch.equal(ours, theirs)
            same = same or (may_overflow and _overflowed(ours) and _overflowed(theirs))
            error = 0.0 if same else relative_error(ours, theirs)
            if _holds_nan(ours) and _holds_nan(theirs) and not same:
                self.nonfinite.append(name)
        self.errors[name] = max(self.errors.get(name, 0.0), error)
        if not same:
            self.unequal.add(name)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return max |a - b| / max |b|; infinite where shapes differ, and where a value is NaN: that equals nothing."""
    if ours.shape != theirs.shape:
        return float("inf")
    a, b = ours.double(), theirs.double()
    same = a == b
    if bool(same.all()):
        return 0.0
    error = float((a - b).abs()[~same].max() / b.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
    return error if error == error else float("inf")  # noqa: PLR0124 - NaN is not itself


def _holds_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


def _overflowed(tensor: torch.Tensor) -> bool:
    """Whether a gradient was too large for float16: the step is left out and the scale comes down, on both sides."""
    return not bool(tensor.isfinite().all())


def _nonfinite(losses: Sequence[float], reference: Sequence[float], tensors: Sequence[str]) -> str:
    """Say what is no finite number, first of all in which step; "" where all is."""
    for step, pair in enumerate(zip(losses, reference, strict=True), start=1):
        ours, theirs = (math.isfinite(loss) for loss in pair)
        if not ours and not theirs:
            return f"both not finite at step {step}: the loss is {pair[0]} in stages and {pair[1]} in plain training"
        if not ours or not theirs:
            where = "in stages only" if theirs else "in plain training only"
            return f"not finite at step {step}, {where}: the loss is {pair[0]} in stages, {pair[1]} in plain training"
    return f"both not finite: {tensors[0]} ({len(tensors)} in all)" if tensors else ""


def _scalar_error(a: float, b: float) -> float:
    return relative_error(torch.tensor([a]), torch.tensor([b]))


def why_not_bitwise(layout: Layout, job: Job) -> tuple[str, ...]:
    """Say what in a plan changes the order of a sum, so that only closeness is promised."""
    reasons = []
    replicated = [stage.index for stage in layout.plan.stages if stage.replicas > 1]
    if replicated:
        reasons.append(f"stages {replicated} are replicated: their gradients are added up per replica first")
    reasons.extend(
        f"{tie.parameter} is tied over stages {[tie.owner, *tie.copies]}: each adds up its own gradient first"
        for tie in layout.plan.ties
        if not tie.exact
    )
    if not layout.graph.exact:
        reasons.append("the model takes another way with the same numbers when it is not captured (a mask of ones)")
    if layout.plan.workload.precision != "fp32":
        reasons.append("autocast: a weight's cast is shared within a stage, not over the whole model")
    if job.device != "cpu":
        reasons.append(f"{job.device} kernels may add up in another order from run to run")
    return tuple(reasons)


Gradients = dict[tuple[int, str], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class _Trained:
    """What a plain run left: gradients by (step, name), final tensors, losses."""

    gradients: Gradients
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    losses: tuple[float, ...]


def _keep(into: Gradients, step: int, parameters: Mapping[str, Any]) -> None:
    for name, parameter in parameters.items():
        into[step, name] = None if parameter.grad is None else parameter.grad.detach().clone()


def _plain(workload: Workload, job: Job, items: Sequence[Any], settings: PlainSettings) -> _Trained:
    gradients: Gradients = {}
    run = plain_training(
        workload,
        items,
        settings,
        device=torch.device(job.device),
        on_gradients=lambda step, parameters: _keep(gradients, step, parameters),
    )
    parameters = {name: parameter.data for name, parameter in run.model.named_parameters()}
    return _Trained(gradients, parameters, dict(run.model.named_buffers()), tuple(run.losses))


def compare(
    workload: Workload, run: RunDirectory, job: Job, layout: Layout, items: Sequence[Any], *, draws: bool
) -> Comparison:
    """Train ``items`` plainly and through the plan with ranks as threads, both on one thread a rank, and compare."""
    ours: Gradients = {}
    plan = layout.plan
    settings = PlainSettings(
        plan.num_microbatches,
        plan.workload.seed,
        draws,
        job.clip_grad_norm,
        staleness(layout),
        deferred_batch_norm=job.deferred_batch_norm,
    )
    reasons = why_not_bitwise(layout, job)
    threads = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        plain = _plain(workload, job, items, settings)
        sessions = run_in_threads(
            run,
            job,
            layout,
            lambda session: session.train(),
            items=lambda epoch: iter(items),
            on_gradients=lambda stage, step, parameters: _keep(ours, step, parameters),
        )
        tensors = {name: tensor for session in sessions for name, tensor in session.tensors().items()}
        found = sessions[0].executor.stepper.losses
        trained = _Trained(ours, tensors, tensors, tuple(found[step] for step in sorted(found)))
        worst = _differences(trained, plain, layout, job)
        if not reasons and (worst.unequal or trained.losses != plain.losses):
            reasons = _other_way(workload, job, layout, items, settings, trained)
        noise = _noise(plain, _plain(workload, job, items, replace(settings, reverse=True))) if reasons else {}
    finally:
        torch.set_num_threads(threads)
    owners = _owners(layout)
    return Comparison(
        tuple(
            TensorDifference(name, error, name not in worst.unequal, owners.get(name, -1), noise.get(name, 0.0))
            for name, error in worst.errors.items()
        ),
        trained.losses,
        plain.losses,
        not reasons,
        reasons,
        statistics.median(noise.values()) if noise else 0.0,
        _nonfinite(trained.losses, plain.losses, worst.nonfinite),
    )


def _differences(trained: _Trained, plain: _Trained, layout: Layout, job: Job) -> _Worst:
    worst = _Worst()
    scaled = layout.plan.workload.precision == "fp16"
    for key, gradient in plain.gradients.items():
        worst.add(key[1], trained.gradients.get(key), gradient, may_overflow=scaled)
    for name, parameter in plain.parameters.items():
        worst.add(name, trained.parameters.get(name), parameter)
    averaged = set() if job.deferred_batch_norm else _averaged_buffers(layout)
    for name, buffer in plain.buffers.items():
        if name in trained.buffers and name not in averaged:
            worst.add(name, trained.buffers[name], buffer)
    return worst


def _other_way(
    workload: Workload, job: Job, layout: Layout, items: Sequence[Any], settings: PlainSettings, trained: _Trained
) -> tuple[str, ...]:
    """Say where a model decides by the data as long as nobody captures it, where that is all that differs.

    It is where plain training equals the stages as soon as the model is told, as it was when it was captured, that it
    is compiled. Whether the other way is the same but for rounding is for the comparison to say.
    """
    asked: list[str] = []

    def explains(only: str = "") -> bool:
        told = _plain(workload, job, items, replace(settings, within=functools.partial(as_compiled, asked, only)))
        return not _differences(trained, told, layout, job).unequal and told.losses == trained.losses

    try:
        if not explains() or not asked:
            return ()
        places = [place for place in asked[:_MOST_PLACES] if explains(place)] or asked
    except Exception as error:  # a way that nobody takes may fail
        logger.info("plain training as it is captured: %s", error)
        return ()
    return (
        f"the model takes another way when it is not captured: it asks at {', '.join(places[:_SHOWN_PLACES])}, as "
        "transformers does to leave out a mask of ones",
    )


def _noise(one: _Trained, other: _Trained) -> dict[str, float]:
    worst = _Worst()
    for key, gradient in one.gradients.items():
        worst.add(key[1], other.gradients.get(key), gradient)
    for name, parameter in one.parameters.items():
        worst.add(name, other.parameters[name], parameter)
    # what is not finite is no noise: else it would excuse every difference
    return {name: error for name, error in worst.errors.items() if math.isfinite(error)}


def _averaged_buffers(layout: Layout) -> set[str]:
    """Return the buffers that replicas average at each step, as the definition says: plain training has no such."""
    return {name for stage in layout.plan.stages if stage.replicas > 1 for name in layout.buffers_written(stage)}


def staleness(layout: Layout) -> dict[str, int]:
    """Return delta by parameter name, where it is not 0."""
    schedule = make(layout.plan.schedule, layout.request)
    owners = _owners(layout)
    return {
        n: schedule.staleness[s] for n, s in owners.items() if n in layout.graph.parameters and schedule.staleness[s]
    }


def _owners(layout: Layout) -> dict[str, int]:
    """Return the stage that steps each parameter: of a tied one the first."""
    owners: dict[str, int] = {}
    for stage in layout.plan.stages:
        for name in stage.parameters:
            owners.setdefault(name, stage.index)
    return owners

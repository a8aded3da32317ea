"""Compare a plan with plain training by tensor: losses, gradients of every step, weights and buffers at the end.

Gradients are compared as well as weights, because an adaptive optimizer hides a gradient that is wrong by a factor.

If a plan adds up in another order than one process (replicas, ties over stages), it is compared, to the last bit, with
a plain loop in the plan's order (``verify.order``). The difference between that order and one process's is measured
between the two plain loops, and reported separately.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopipe.errors import counted
from autopipe.runtime.context import RunContext
from autopipe.runtime.job import Job, RunDirectory
from autopipe.schedules import make
from autopipe.trace.record.patches import as_compiled
from autopipe.verify import in_stages
from autopipe.verify.comparison import Comparison, TensorDifference, Worst, nonfinite
from autopipe.verify.compiled_model import CompiledModel
from autopipe.verify.in_stages import Trained, same, train_in_stages
from autopipe.verify.noise import (
    ENLARGED,
    add_noise,
    finite,
    largest_of,
    noise_between,
    noise_of_compiler,
    noise_of_path,
    usual,
    without_compiler,
)
from autopipe.verify.order import SumOrder, why_another_order, why_not_bitwise
from autopipe.verify.plain import PlainSettings
from autopipe.verify.plain_runs import Apart, PlainRuns
from autopipe.verify.split_sums import SplitSums
from autopipe.workload import Workload

logger = logging.getLogger(__name__)

# a tensor whose values are smaller than this part of the largest of all tensors has errors relative to that
_LEAST_SCALE = 1e-3
# how many lines that ask whether the model is captured are tried one by one, and named
_MOST_PLACES, _SHOWN_PLACES = 8, 3


def settings_of(context: RunContext, job: Job, *, draws: bool) -> PlainSettings:
    """Return the settings of plain training that is that of a plan, but for the order of its sums."""
    return PlainSettings(
        context.plan.num_microbatches,
        context.plan.workload.seed,
        draws,
        job.clip_grad_norm,
        staleness(context),
        deferred_batch_norm=job.deferred_batch_norm,
        ema=job.ema,
    )


def compare(
    workload: Workload,
    run: RunDirectory,
    job: Job,
    context: RunContext,
    items: Sequence[Any],
    *,
    draws: bool,
    evaluate: bool = False,
    apart: Apart | None = None,
) -> Comparison:
    """Train ``items`` by the plain loop and in stages with ranks as threads, and compare the results.

    ``evaluate``: compare an evaluation of the first of them, too. ``apart``: for a graph with numbers.
    """
    plan, order = context.plan, SumOrder.of(context)
    settings = settings_of(context, job, draws=draws)
    reasons = why_not_bitwise(context, job)
    loop = PlainRuns(workload, run, job, context, items, settings, apart=apart)
    threads = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        # first: the ranks record batches of other shapes, with their divisors
        evaluate = evaluate and in_stages.can_be_compared(workload, items[0], settings, loop.device)
        evaluated = items[:1] if evaluate else ()
        trained, divisors = _in_stages(loop, items, evaluated)
        loop = replace(loop, settings=replace(settings, divisors=dict(enumerate(divisors))))
        plain = loop.train()
        orders = _Orders()
        reference = plain
        if order.shared and plan.team > 1:
            order = order.without_shared()  # a stage alone does not have the parts of other members
        elif order.shared and (why := _joined_difference(loop, plain)):
            reasons, order = (*reasons, why), order.without_shared()
        if not order.plain:
            reference = loop.in_order(order)
            orders = _Orders.between(plain, reference)
        two_paths = not context.graph.exact
        if not reasons and _differ(trained, reference, loop):  # so the graph is exact, and there are no teams
            reasons = _other_path(loop, order, trained)
            two_paths = bool(reasons)
        if plan.team > 1 or two_paths or job.compile:  # optimizers such as Adam enlarge rounding: each step alone
            loop = replace(loop, forced=trained.gradients)
            reference = loop.in_order(order)
        worst = _differences(trained, reference, context, job)
        for name in _reported(context, plain) - trained.buffers.keys():
            worst.add(name, None, plain.buffers[name])
        noise = Worst()
        if reasons:
            noise = noise_between(reference, loop.rounded(order), buffers=False)
        if plan.team > 1:
            add_noise(noise, noise_between(reference, loop.in_order(order, within=lambda: SplitSums(plan.team))))
        if job.compile:
            add_noise(noise, noise_between(reference, loop.in_order(order, enlarged=ENLARGED)))
        reordered = dict(noise.errors)
        if two_paths:
            reasons = (*reasons, _add_noise_of_path(noise, reference, loop, order))
        if job.compile:
            reasons = (*reasons, _add_noise_of_compiler(noise, reordered, loop, reference, order))
    finally:
        torch.set_num_threads(threads)
    owners, skipped = _owners(context), len(reference.skipped)
    compiled = context.plan.workload.precision if job.compile else ""
    nothing = f"all {counted(skipped, 'step')} overflow in float16 and are skipped" if skipped == len(items) else ""
    first = [
        n for (step, n), g in reference.gradients.items() if not step and not same(trained.gradients.get((0, n)), g)
    ]
    return Comparison(
        tuple(
            TensorDifference(
                name,
                _with_state(error, worst, noise, name),
                name not in worst.unequal,
                owners.get(name.removeprefix("ema."), -1),
                max(noise.errors.get(name, 0.0), noise.states.get(name, 0.0)),
                worst.gradients.get(name, 0.0),
                noise.gradients.get(name, 0.0),
                orders.errors.get(name, 0.0),
                orders.gradients.get(name, 0.0),
                orders.weights.get(name, 0.0),
                reordered.get(name, 0.0),
            )
            for name, error in worst.errors.items()
        ),
        trained.losses,
        reference.losses,
        not reasons,
        reasons,
        usual(noise.errors, reference.buffers, compiled),
        nonfinite(trained.losses, reference.losses, worst.nonfinite) or nothing,
        usual(noise.gradients, reference.buffers, compiled),
        why_another_order(context),
        not first and trained.losses[:1] == reference.losses[:1],
        all(same(trained.after_first.get(name), tensor) for name, tensor in reference.after_first.items()),
        tuple(first),
        tuple(sorted(name for name in worst.unequal if not worst.errors[name])),
        skipped,
        _left_out(context, job),
        _evaluation(trained, loop, items),
    )


def _in_stages(loop: PlainRuns, items: Sequence[Any], evaluated: Sequence[Any]) -> tuple[Trained, list[Any]]:
    """As ``train_in_stages``, with the process that knows the numbers, if there are some."""
    with contextlib.nullcontext() if loop.apart is None else loop.apart.reads() as reads:
        run, job, context = loop.run, loop.job, loop.context
        return train_in_stages(loop.workload, run, job, context, items, evaluated=evaluated, reads=reads)


def _evaluation(trained: Trained, loop: PlainRuns, items: Sequence[Any]) -> tuple[float, ...]:
    """Return the loss of the evaluation after training, and that of the model; () if there was none."""
    if not trained.evaluation:
        return ()
    plain = in_stages.plain_evaluation(loop.workload, items[0], trained, loop.settings, loop.device)
    return trained.evaluation[-1], plain


# a state that rounding changes by more is the state for a gradient that is zero but for rounding
_MOST_OF_STATE = 0.1


def _with_state(error: float, worst: Worst, noise: Worst, name: str) -> float:
    """Return the error of a tensor, the optimizer's state for it included if it is more than rounding."""
    if max(noise.errors.get(name, 0.0), noise.states.get(name, 0.0)) >= _MOST_OF_STATE:
        return error
    return max(error, worst.states.get(name, 0.0))


def _reported(context: RunContext, plain: Trained) -> set[str]:
    """Return the buffers that stages must report: those that a stage has, or that training changes."""
    of_stages = {name for stage in context.plan.stages for name in stage.buffers}
    return (of_stages | plain.moved) & plain.buffers.keys()


def _left_out(context: RunContext, job: Job) -> tuple[str, ...]:
    left_out = []
    if context.graph.varies:
        left_out.append("no smaller minibatch and no full batch compared: the model's Python would do something else")
    averaged = set() if job.deferred_batch_norm else _averaged_in_flight(context)
    if averaged:
        left_out.append(
            f"{counted(len(averaged), 'buffer')} of replicated stages ({min(averaged)}) compared with nothing: "
            "replicas average them while later microbatches run, which no plain loop does"
        )
    return tuple(left_out)


@dataclass(frozen=True, slots=True)
class _Orders:
    """The effect of the plan's order of sums, by tensor; see ``comparison.TensorDifference``."""

    errors: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def between(plain: Trained, reference: Trained) -> _Orders:
        """Compare the two plain loops. The gradient of a bias before a BatchNorm, which is zero, has no large error."""
        every, first, last = Worst(), Worst(), Worst()
        scale = _LEAST_SCALE * largest_of(plain.gradients.values())
        for (step, name), gradient in plain.gradients.items():
            for worst in (every,) if step else (every, first):
                worst.add(name, reference.gradients.get((step, name)), gradient, least=scale)
        scale = _LEAST_SCALE * largest_of(plain.parameters.values())
        for name, parameter in plain.parameters.items():
            for worst in (every, last):
                worst.add(name, reference.parameters[name], parameter, least=scale)
        return _Orders(*(finite(worst.errors) for worst in (every, first, last)))


def _joined_difference(loop: PlainRuns, plain: Trained) -> str:
    """Return why the stages, joined in one process, differ from plain training, "" if no bit differs."""
    if loop.apart is not None:
        return "the stages that share parameters are not joined in one process, where numbers of Python would be others"
    try:
        joined = loop.train(loop.joined(shared=True))
    except Exception as error:  # a plan is not refused because its order of sums cannot be proven
        logger.info("the stages cannot be joined in one process: %s", error)
        return f"the stages that share parameters cannot be joined in one process ({type(error).__name__})"
    unlike = _differ(joined, plain, loop)
    return "the stages of the model, joined in one process, round differently" if unlike else ""


def _differ(one: Trained, other: Trained, loop: PlainRuns) -> bool:
    """Return whether any bit differs."""
    return bool(_differences(one, other, loop.context, loop.job).unequal) or one.losses != other.losses


def _differences(trained: Trained, plain: Trained, context: RunContext, job: Job) -> Worst:
    worst = Worst()
    skipped = trained.skipped & plain.skipped
    for key, gradient in plain.gradients.items():
        worst.add_gradient(key[1], trained.gradients.get(key), gradient, skipped=key[0] in skipped)
    for name, parameter in plain.parameters.items():
        worst.add(name, trained.parameters.get(name), parameter)
    averaged = set() if job.deferred_batch_norm else _averaged_in_flight(context)
    for name, buffer in plain.buffers.items():
        if name in trained.buffers and name not in averaged:
            worst.add(name, trained.buffers[name], buffer)
    for name, values in plain.states.items():
        worst.add_state(name, trained.states.get(name, {}), values)
    for name in (trained.unlike & worst.errors.keys()) - averaged:
        worst.errors[name] = math.inf
        worst.unequal.add(name)
    return worst


def _other_path(loop: PlainRuns, order: SumOrder, trained: Trained) -> tuple[str, ...]:
    """Return the lines at which the model branches on ``is_compiling()``, if this explains all differences; else ().

    ``torch.compiler.is_compiling()`` is True during capture and False in plain training, so a model may take two paths.
    It explains the differences if plain training with True equals the stages.
    """
    if loop.apart is not None:
        return ()
    asked: list[str] = []

    def explains(only: str = "") -> bool:
        as_captured = loop.in_order(order, within=functools.partial(as_compiled, asked, only))
        return not _differ(trained, as_captured, loop)

    try:
        if not explains() or not asked:
            return ()
        places = [place for place in asked[:_MOST_PLACES] if explains(place)] or asked
    except Exception as error:  # a path that is never taken may fail
        logger.info("plain training of the captured graph: %s", error)
        return ()
    return (
        f"the model takes another path when it is not captured: it asks at {', '.join(places[:_SHOWN_PLACES])}, as "
        "transformers does to skip a mask of ones",
    )


def _add_noise_of_path(noise: Worst, plain: Trained, loop: PlainRuns, order: SumOrder) -> str:
    """Add to ``noise`` what the captured path changes in the plain loop. Return a sentence on it."""
    try:
        captured = loop.in_order(order, within=as_compiled)
    except Exception as error:  # a path that is never taken may fail
        logger.info("plain training of the captured graph: %s", error)
        return f"the captured path fails in plain training: {type(error).__name__}"
    difference, text = noise_of_path(plain, captured, loop.context.plan.workload.precision)
    add_noise(noise, difference)
    return text


def _add_noise_of_compiler(
    noise: Worst, reordered: Mapping[str, float], loop: PlainRuns, reference: Trained, order: SumOrder
) -> str:
    """Add to ``noise`` what a compiler changes in plain training of the user's model. Return a sentence on it."""
    if order.shared:  # the model has one tensor for the stages that share a parameter
        order = order.without_shared()
        reference = loop.in_order(order)
    try:
        compiled = loop.train(CompiledModel(loop.workload, loop.device, loop.context.graph), order=order)
    except Exception as error:  # training compiles its stages, which may succeed
        logger.info("the model cannot be compiled as a whole: %s", error)
        add_noise(noise, noise_between(reference, loop.in_order(order, within=lambda: SplitSums(2))))
        return without_compiler(error)
    more, text = noise_of_compiler(reference, compiled, reordered, loop.context.plan.workload.precision)
    add_noise(noise, more)
    return text


def _averaged_in_flight(context: RunContext) -> set[str]:
    """Return the buffers that replicas average while later microbatches run, which no plain loop reproduces.

    There are some if steps overlap. If the pipeline drains, the loop averages them as docs/semantics.md defines.
    """
    if not any(make(context.plan.schedule, context.request).staleness):
        return set()
    return {name for stage in context.plan.stages if stage.replicas > 1 for name in context.buffers_written(stage)}


def staleness(context: RunContext) -> dict[str, int]:
    """Return the staleness by parameter name, without zeros."""
    schedule = make(context.plan.schedule, context.request)
    owners = _owners(context)
    return {
        n: schedule.staleness[s] for n, s in owners.items() if n in context.graph.parameters and schedule.staleness[s]
    }


def _owners(context: RunContext) -> dict[str, int]:
    """Return the stage that steps each parameter: for a tied one, the first."""
    owners: dict[str, int] = {}
    for stage in context.plan.stages:
        for name in stage.parameters:
            owners.setdefault(name, stage.index)
    return owners

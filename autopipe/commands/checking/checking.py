"""Compare a plan with plain training: ``check``, and what ``first_steps`` compares for a new plan."""

from __future__ import annotations

import itertools
import platform
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autopipe import __version__
from autopipe.commands.artifact_steps import batch_size_of, prepare
from autopipe.commands.changing import COMPILED, refuse_varying
from autopipe.commands.checking.apart import Processes
from autopipe.commands.checking.batch_sizes import PlainModel, refusal
from autopipe.commands.checking.blocks import Blocks, without_blocks
from autopipe.commands.checking.causes import hidden_cause, unequal
from autopipe.commands.checking.fitting import Need, Place, need_of, not_checked, out_of_memory, place_of
from autopipe.commands.checking.full_batch import compared_with_the_whole, refusal_of_weights
from autopipe.commands.checking.task import Compared, ComparisonTask, Wanted
from autopipe.commands.locks import only_one
from autopipe.commands.prepared import Prepared
from autopipe.commands.settings import CheckSettings, Progress, ignore_event
from autopipe.commands.store import Work
from autopipe.commands.training.lookahead import covered, first_minibatches, refuse_changed_data
from autopipe.errors import AutopipeError, RunError, counted
from autopipe.ir import artifact
from autopipe.planning.cost.predict import RunCosts
from autopipe.report.results import CheckReport, ParameterError
from autopipe.runtime.batches.graph_variants import EVALUATION
from autopipe.runtime.compiled import refuse_uncompilable
from autopipe.runtime.context import RunContext
from autopipe.runtime.job import Job, RunDirectory
from autopipe.trace.loss.coupling import normalised_layers
from autopipe.trace.numbers import CHANGING
from autopipe.verify.check import compare, staleness
from autopipe.verify.comparison import Comparison
from autopipe.verify.overflow import until_taken
from autopipe.verify.plain import PlainSettings
from autopipe.workers.task import Link
from autopipe.workers.worker import Worker, needs_worker, result_of
from autopipe.workload.batches.items import kept
from autopipe.workload.target.targets import in_full

# the fewest steps to compare by default: the third reads the optimizer's state that the second changed
_FEWEST_STEPS = 3


def steps_to_compare(prepared: Prepared) -> int:
    """Return how many steps show every difference of a schedule: the oldest weights are not the initial ones."""
    stale = staleness(RunContext.of(prepared.plan, prepared.graph))
    return max(_FEWEST_STEPS, max(stale.values(), default=0) + 2)


def write_run(path: Path, job: Job, prepared: Prepared) -> RunDirectory:
    """Write everything that the ranks need to the run directory ``path``, which can be used from any folder."""
    run = RunDirectory(path)
    run.write(job, replace(prepared.plan, workload=in_full(prepared.plan.workload)), prepared.graph)
    versions = {"autopipe": __version__, "Python": platform.python_version(), "torch": str(torch.__version__)}
    artifact.save(prepared.record, run.record)
    artifact.save(RunCosts.of(prepared.plan, prepared.profile, prepared.cluster, versions), run.costs)
    shutil.rmtree(run.stages, ignore_errors=True)
    # code for batches of other shapes is not copied: ranks write it, and its author in this folder is not known
    others = shutil.ignore_patterns("__pycache__", "shape_*", f"{EVALUATION}_*")
    shutil.copytree(prepared.stages, run.stages, ignore=others)
    return run


def check(settings: CheckSettings, progress: Progress | None = None) -> CheckReport:
    """Train a few steps plainly and through the plan, and compare every tensor.

    The last minibatch is one sample smaller, so that microbatches of unequal size are compared as well. Ranks are
    threads; the stage files, the schedule and the loop over instructions are those of ``train``.
    """
    with only_one(settings.plan.work_dir, "compares a plan with plain training"):
        prepared = prepare(settings.plan, progress)
        if prepared.plan.num_processes > 1:
            work, again = Work.begin(settings.plan.work_dir, progress), partial(prepare, settings.plan, progress)
            prepared = covered(prepared, first_minibatches(prepared).forms, work, again, progress=progress)
        if settings.full_batch:
            refuse_varying(prepared.graph, "a full batch (--full-batch) would do something else than its microbatches")
        if settings.deferred_batch_norm:
            refuse_varying(prepared.graph, "its statistics cannot be deferred (--deferred-batch-norm)")
        if settings.compile:
            refuse_varying(prepared.graph, COMPILED)
            refuse_uncompilable(prepared.plan)
        refuse_changed_data(prepared)
        hidden = hidden_cause(prepared)
        wanted = Wanted(
            steps=settings.steps or steps_to_compare(prepared),
            clip_grad_norm=settings.clip_grad_norm,
            deferred_batch_norm=settings.deferred_batch_norm,
            ema=settings.plan.ema or 0.0,
            compile=settings.compile,
            evaluate=evaluates(prepared),
            full_batch="step" if settings.full_batch else gradient_of_full_batch(prepared),
        )
        compared = compare_plan(prepared, wanted)
        result = compared.comparison
        if result is None:
            raise hidden or RunError(compared.note)
        prepared = replace(prepared, warnings=(*prepared.warnings, *filter(None, [compared.note])))
        cause = hidden or (None if result.equal or result.nonfinite else unequal(result, prepared))
        cause = cause or refusal_of_weights(compared.full_batch)
        return replace(_report(result, prepared, cause), full_batch=compared.full_batch)


def compare_plan(prepared: Prepared, wanted: Wanted, *, instead: str = "") -> Compared:
    """Compare on the device on which it fits; see ``fitting``. On a GPU, in a process of its own.

    Raises: RunError if that process ends early; ``instead``: a further remedy for it.
    """
    if needs_worker(prepared.profile.device.kind):
        task, doing = ComparisonTask.of(prepared, wanted), "comparing with plain training"
        worker = Worker(compare_for_command, task, doing=doing, threads=torch.get_num_threads(), instead=instead)
        return Compared.decode(result_of(worker, ignore_event))
    return compare_here(prepared, wanted)


def compare_for_command(task: Any, link: Link) -> dict[str, Any]:
    """Compare in the process that a command has started. ``task``: a ``ComparisonTask`` as JSON values."""
    decoded = ComparisonTask.decode(task)
    return compare_here(decoded.prepared(), decoded.wanted).encode()


def compare_here(prepared: Prepared, wanted: Wanted) -> Compared:
    """Compare in this process, on the device on which it fits."""
    if lack := _lack_of_python(prepared, wanted):
        return Compared(None, f"not checked: {lack}")
    need = need_of(prepared, wanted.steps)
    if wanted.some_blocks:
        return _compare_some_blocks(prepared, wanted, need, "with the complete model, it does not fit beside the ranks")
    place = place_of(prepared, need)
    if not place.device:
        return _compare_some_blocks(prepared, wanted, need, f"comparing with plain training needs {place.why}")
    return _compare_in(place, prepared, wanted)


def _compare_some_blocks(prepared: Prepared, wanted: Wanted, need: Need, why: str) -> Compared:
    """Compare with as many of the model's repeated blocks as fit. ``why``: the complete model does not fit."""
    blocks = Blocks(prepared.plan, prepared.graph)
    # a model that varies would run its Python otherwise
    fitting = None if prepared.graph.varies else blocks.fitting(prepared, need)
    if fitting is None:
        return Compared(None, not_checked(why, prepared))
    paths, place = fitting
    try:
        with without_blocks(prepared, paths, wanted.scratch) as shorter:
            compared = _compare_in(place, shorter, replace(wanted, evaluate=False))
    except AutopipeError as error:
        return Compared(None, not_checked(f"{why}; {error.what}", prepared))
    if compared.comparison is None:
        return compared
    part = blocks.without(paths)
    note = f"compared with {part} of the model{', and without an evaluation' if wanted.evaluate else ''}: {why}"
    return replace(compared, part=part, note="; ".join(filter(None, (note, compared.note))))


def _compare_in(place: Place, prepared: Prepared, wanted: Wanted) -> Compared:
    try:
        compared = Compared(_compare_at(place, prepared, wanted), place.why)
    except Exception as error:
        reason = out_of_memory(error, place.device)
        if not reason:
            raise
        return Compared(None, not_checked(reason, prepared))
    if wanted.full_batch:
        full = compared_with_the_whole(prepared, step=wanted.full_batch == "step")
        compared = replace(compared, full_batch=full)
    return compared


def _lack_of_python(prepared: Prepared, wanted: Wanted) -> str:
    """Return why a comparison cannot follow the model's Python; "" if it can, or need not."""
    cause = "--compile" if wanted.compile else "float16" if prepared.plan.workload.precision == "fp16" else ""
    cause = cause or ("" if prepared.graph.exact else "a model that takes another path when it is captured")
    return f"{CHANGING}, and {cause} needs further trainings" if prepared.graph.varies and cause else ""


def _compare_at(place: Place, prepared: Prepared, wanted: Wanted) -> Comparison:
    plan, workload = prepared.plan, prepared.workload
    size = batch_size_of(workload, plan)
    epochs = (workload.items(size, epoch=epoch) for epoch in itertools.count())  # an empty epoch raises
    source = map(kept, itertools.chain.from_iterable(epochs))

    def last(item: Any) -> Any:
        samples = workload.num_samples(item)
        smaller = (
            samples > 1
            and not prepared.graph.varies
            and workload.cuts_by_dimension(item)
            and not _leaves_one(prepared, samples)
        )
        return workload.resized(item, samples - 1) if smaller else item

    if plan.workload.precision == "fp16":
        settings = PlainSettings(plan.num_microbatches, plan.workload.seed, prepared.graph.draws)
        items = until_taken(workload, source, wanted.steps, settings, torch.device(place.device), last)
        full = items[0]
    else:
        items = list(itertools.islice(source, wanted.steps))
        full = items[-1]
        items[-1] = last(full)
    job = Job(
        steps=len(items),
        epochs=0,
        batch_size=size or 0,
        device=place.device,
        threads=place.threads,
        save=False,
        max_shapes=prepared.max_shapes,
        allow_data_dependent=prepared.allow_data_dependent,
        on_nonfinite="warn",
        initial=workload.models.initial,
        clip_grad_norm=wanted.clip_grad_norm,
        deferred_batch_norm=wanted.deferred_batch_norm,
        ema=wanted.ema,
        compile=wanted.compile,
    )
    try:
        result = _compared(prepared, job, items, wanted)
    except Exception as error:
        if out_of_memory(error, place.device):
            raise
        refused = refusal(prepared, full, place.device)
        if refused is not None:
            raise refused from None
        if not _refuses(prepared, items[-1], place.device):
            raise
    else:
        if not result.nonfinite or not _refuses(prepared, items[-1], place.device):
            return result
    # the model rejects the smaller minibatch, which training does not need: compare without it
    return _compared(prepared, job, [*items[:-1], full], wanted)


def _compared(prepared: Prepared, job: Job, items: Sequence[Any], wanted: Wanted) -> Comparison:
    with tempfile.TemporaryDirectory(prefix="autopipe-check-", dir=wanted.scratch or None) as scratch:
        run = write_run(Path(scratch), job, prepared)
        context = RunContext.of(prepared.plan, prepared.graph)
        apart = Processes(run, job.threads) if prepared.graph.varies else None
        draws, evaluate = prepared.graph.draws, wanted.evaluate
        return compare(prepared.workload, run, job, context, items, draws=draws, evaluate=evaluate, apart=apart)


def gradient_of_full_batch(prepared: Prepared) -> str:
    """Return the field ``full_batch`` of what is compared: a model that varies does something else for a full batch."""
    return "" if prepared.graph.varies else "gradient"


def evaluates(prepared: Prepared) -> bool:
    """Return whether the model can be evaluated in stages."""
    return prepared.workload.has_evaluation_data and not prepared.evaluation_note


def _refuses(prepared: Prepared, item: Any, device: str) -> bool:
    """Return whether the unmodified model rejects a microbatch of a minibatch."""
    model = PlainModel(prepared.workload, device)
    return model.refuses(item, prepared.plan.num_microbatches) is not None


def _leaves_one(prepared: Prepared, samples: int) -> bool:
    """Return whether a minibatch of ``samples - 1`` has a microbatch of one sample, and one of ``samples`` has not.

    Layers with batch statistics may reject a microbatch of one sample.
    """
    parts = prepared.plan.num_microbatches
    return samples // parts > 1 and (samples - 1) // parts == 1 and bool(normalised_layers(prepared.graph))


def _report(comparison: Comparison, prepared: Prepared, cause: AutopipeError | None) -> CheckReport:
    parameters = tuple(
        ParameterError(
            d.name, _finite(d.error), d.owner, d.order, d.order_gradient, d.order_weight, _finite(d.gradient)
        )
        for d in comparison.differences
    )
    alone = comparison.rounding_alone
    rounding = (
        [f"the gradients of {counted(len(alone), 'tensor')} are zero but for rounding ({alone[0]})"] if alone else []
    )
    return CheckReport(
        equal=comparison.equal and cause is None,
        bitwise=comparison.bitwise and cause is None,
        max_relative_error=_finite(comparison.max_relative_error),
        parameters=parameters,
        warnings=(
            *prepared.warnings,
            *comparison.orders,
            *comparison.reasons,
            *rounding,
            *_skipped(comparison),
            *comparison.left_out,
        ),
        losses=comparison.losses,
        reference_losses=comparison.reference_losses,
        notes=prepared.notes,
        nonfinite=comparison.nonfinite,
        orders=comparison.orders,
        order_error=_finite(comparison.order_error),
        cause="" if cause is None else str(cause),
        tolerance=comparison.tolerance,
        gradient_tolerance=comparison.gradient_tolerance,
        modules=tuple(stage.modules for stage in prepared.plan.stages),
        gradient_error=_finite(max((d.gradient for d in comparison.differences if d.name not in alone), default=0.0)),
    )


def _skipped(comparison: Comparison) -> list[str]:
    if not comparison.skipped:
        return []
    steps = counted(len(comparison.losses), "step")
    return [f"a gradient overflows in float16 in {comparison.skipped} of {steps}, which are skipped on both sides"]


def _finite(error: float) -> float:
    """Return an error that JSON can represent: infinity and NaN become the largest error."""
    return min(error, 1e30)

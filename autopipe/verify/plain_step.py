"""One step of a run by the plain loop, from the state and batch of the run, compared with the result of the run.

It proves that from this state and this minibatch, the user's model, loss, optimizer and scheduler, each rebuilt, lead
to the state of the run after the step: weights, buffers, averages, the state of the optimizer. If this process reads
the first minibatch that the command has read, it also proves that the minibatch is the one at its place. It cannot
detect state that existed only in the process of the run, such as a counter in the user's file.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import torch
from torch import nn

from autopipe import sparse
from autopipe.draws import exclusive
from autopipe.errors import RunError
from autopipe.ir.rounding import allowed
from autopipe.runtime.after_step.average import PREFIX
from autopipe.runtime.audit import batch
from autopipe.runtime.audit.files import DIFFERENT, EQUAL, LEFT_OUT, AuditFiles, AuditResult
from autopipe.runtime.checkpoint import state
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.manifest import Manifest
from autopipe.runtime.context import RunContext
from autopipe.runtime.job import RunDirectory
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.training_state.describe import Description
from autopipe.trace.record.patches import as_compiled
from autopipe.verify.audited_state import PlainStep, RunStep, state_of
from autopipe.verify.check import staleness
from autopipe.verify.comparison import ROUNDING_ALONE, Comparison, TensorDifference, relative_error
from autopipe.verify.compiled_model import CompiledModel
from autopipe.verify.joined import JoinedStages
from autopipe.verify.noise import ENLARGED, of_compiler, usual
from autopipe.verify.order import SumOrder, why_not_bitwise
from autopipe.verify.plain import PlainSettings, Resumed, Subject, plain_training
from autopipe.verify.split_sums import SplitSums
from autopipe.workload import Workload
from autopipe.workload.batches.digests import chained, digest_of

# The place of an audited minibatch in the data, found by reading the data from its beginning as a plain loop does.

READ_SECONDS = 5.0
"""How long an audit reads; a minibatch further on is not compared."""


def is_in_place(workload: Workload, batch_size: int, first: str, before: Manifest, item: Any) -> bool | None:
    """Return whether a minibatch is the one that the data gives at the place that a run has reached.

    ``first``: the digest of the first minibatch as the command has read it. ``before``: the manifest of the state
    before the minibatch, with the digest of the minibatches of the epoch so far. None: this process reads another first
    minibatch than the command did, it takes too long to read so far, or two readings differ.
    """
    expected = first, before.data or "", digest_of(item)
    readings: list[tuple[str, str, bytes]] = []
    while len(readings) < 2:  # a difference counts if it is the same in a second reading
        reading = _read(workload, batch_size or None, before.epoch, before.position)
        if reading is None or reading[0] != first:
            return None
        if reading == expected:
            return True
        readings.append(reading)
    return False if readings[0] == readings[1] else None


def _read(workload: Workload, batch_size: int | None, epoch: int, position: int) -> tuple[str, str, bytes] | None:
    """Return the digests of the first minibatch, of the first ones of an epoch, and of the next one.

    The next one is that of another epoch if the epoch ends there. None after READ_SECONDS.
    """
    deadline = time.monotonic() + READ_SECONDS
    first, digest, count = "", b"", 0
    for number in range(epoch + 2):
        with exclusive():
            minibatches = iter(workload.items(batch_size, epoch=number))
        while True:
            with exclusive():
                item = next(minibatches, None)
            if item is None:
                break
            first = first or digest_of(item).hex()
            if number >= epoch and count == position:
                return first, digest.hex(), digest_of(item)
            if number == epoch:
                digest, count = chained(digest, digest_of(item)), count + 1
            if time.monotonic() > deadline:
                return None
        if number == epoch and count != position:
            break
    return first, digest.hex(), b""


logger = logging.getLogger(__name__)

# the part of the free memory that an audit may use
MEMORY_SHARE = 0.8
_SKIPPED = "float16 skipped the step, which proves nothing; the next step that is taken is audited instead"
_OUT_OF_PLACE = "its minibatch is not the one that the data gives at this place when it is read from its beginning"


def audit(path: Path, step: int, loss: float, elsewhere: str = "") -> AuditResult:
    """Compare minibatch ``step`` of the run at ``path``, whose loss was ``loss``, with the plain loop.

    ``elsewhere``: why the processors of the ranks may round differently from this one, "" if they are the same. The
    files of the data may be others there, so the place of the minibatch in the data is only verified here.

    Raises: ArtifactError if a file of the audit is damaged; the errors of the user's code.
    """
    run = RunDirectory(path)
    job, plan, graph = run.job(), run.plan(), run.graph()
    context, files = RunContext.of(plan, graph), AuditFiles(path, step)
    needed = memory_bytes(context)
    free = _free_bytes(torch.device(job.device))
    if needed > MEMORY_SHARE * free:
        return AuditResult(
            step, LEFT_OUT, reason=f"the plain step needs about {needed} bytes of memory; {free} are free"
        )
    torch.set_num_threads(job.threads)
    ours = RunStep.read(files)
    in_place = None
    if job.first_minibatch and not elsewhere:
        item, _ = batch.load(files.batch)
        workload = Workload.from_spec(context.plan.workload)
        in_place = is_in_place(workload, job.batch_size, job.first_minibatch, ours.before.manifest, item)
    if in_place is False:
        return AuditResult(step, DIFFERENT, reason=_OUT_OF_PLACE, in_place=False)
    order = SumOrder.of(context)
    settings = PlainSettings(
        plan.num_microbatches,
        plan.workload.seed,
        graph.draws,
        job.clip_grad_norm,
        staleness(context),
        deferred_batch_norm=job.deferred_batch_norm,
        ema=job.ema,
        order=None if order.plain else order,
    )
    take = functools.partial(_plain, run, context, files, torch.device(job.device))
    try:
        plain = take(settings)
    except RunError as error:  # the state of the stages is not the complete state of one training
        return AuditResult(step, DIFFERENT, reason=error.what)
    if not _finite(plain.tensors, plain.loss) and (job.on_nonfinite == "skip" or not _finite(ours.tensors, loss)):
        return AuditResult(step, LEFT_OUT, reason="the step is not finite, and proves nothing")
    reasons = (*why_not_bitwise(context, job), *([elsewhere] if elsewhere else []))
    compared = _compared(ours, loss, plain, context, reasons, take, settings, compiled=job.compile)
    if not compared.equal and not reasons:
        asked: list[str] = []
        captured = take(replace(settings, within=functools.partial(as_compiled, asked, "")))
        if asked and _compared(ours, loss, captured, context, (), take, settings).equal:
            reasons = (f"the model takes another path when it is not captured: it asks at {asked[0]}",)
            compared = _compared(ours, loss, plain, context, reasons, take, settings)
    if compared.equal and ours.skipped:
        return AuditResult(step, LEFT_OUT, reason=_SKIPPED)
    return replace(_result(step, compared), in_place=in_place)


def memory_bytes(context: RunContext) -> int:
    """Return an estimate of the memory of the plain step: that of all stages, and the tensors to compare."""
    parameters = context.graph.parameter_bytes
    return sum(stage.peak_bytes for stage in context.plan.stages) + 3 * parameters


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    return int(torch.cuda.mem_get_info(device)[0]) if torch.cuda.is_available() else 0


def _finite(tensors: Mapping[str, torch.Tensor], loss: float) -> bool:
    parts = [part for tensor in tensors.values() for part in sparse.stored(tensor)]
    return all(bool(part.isfinite().all()) for part in (*parts, torch.tensor(loss)))


def _plain(
    run: RunDirectory,
    context: RunContext,
    files: AuditFiles,
    device: torch.device,
    settings: PlainSettings,
    *,
    compiled: bool = False,
) -> PlainStep:
    """Take the step with a new model, optimizer and scheduler, in the plan's order of sums.

    ``compiled``: with the user's model, compiled.
    """
    workload = Workload.from_spec(context.plan.workload)
    item, divisors = batch.load(files.batch)
    settings = replace(settings, divisors={files.step: divisors})
    # the user's model has one tensor for all stages that share a parameter; if each sums its own part, the stages run
    shared = settings.order is not None and settings.order.shared
    subject = CompiledModel(workload, device, context.graph) if compiled else Subject(workload, device)
    if shared:
        subject = JoinedStages(run, context, workload, device, shared=False)
    source, before = Checkpoint(files.before), list[Description]()

    def restore(subject: Subject, optimizer: Any, scheduler: Any, scaler: Any) -> list[dict[str, torch.Tensor]]:
        lacking = {f"model.{name}" for name in _buffers(context) & subject.buffers().keys()} - {*source.names}
        if lacking:
            raise RunError(f"no stage reports the buffer {min(lacking).removeprefix('model.')}")
        older = _restore(source, max(settings.staleness.values(), default=0), subject, optimizer, scheduler, scaler)
        before.append(state_of(subject.parameters, optimizer, scheduler))
        return older

    averaged = [name for name in source.names if name.startswith(PREFIX)]
    averages = {name.removeprefix(PREFIX): tensor.to(device) for name, tensor in source.read(averaged).items()}
    resumed = Resumed(files.step, restore, averages)
    of_one = plain_training(workload, [item], settings, device=device, subject=subject, resumed=resumed)
    return PlainStep.of(of_one, before[0])


@dataclass(slots=True)
class _Weights:
    """The weights of a complete model, with the interface of ``WeightVersions``."""

    masters: dict[str, nn.Parameter]
    staleness: int = 0

    def start_at(self, version: int) -> None:
        """Do nothing: there is one version."""

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        """Return the weights."""
        return {name: parameter.data for name, parameter in self.masters.items()}


def _restore(
    source: Checkpoint,
    depth: int,
    subject: Subject,
    optimizer: torch.optim.Optimizer | None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    scaler: Any,
) -> list[dict[str, torch.Tensor]]:
    """Restore a complete model from a checkpoint, and return at most ``depth`` older versions, oldest first."""
    parameters = subject.parameters
    stage = SimpleNamespace(named_buffers=lambda: subject.buffers().items(), constants=(), SHARDS={})
    whole = cast(StageRunner, SimpleNamespace(stage=stage, versions=_Weights(parameters)))
    state.restore(source, whole, parameters, optimizer, scheduler)
    manifest = source.manifest
    if scaler is not None and manifest.scale:
        scaler.load_state_dict({**scaler.state_dict(), "scale": manifest.scale, "_growth_tracker": manifest.good_steps})
    older = []
    for version in range(max(manifest.step - depth, 0), manifest.step):
        stored = [name for name in parameters if f"version.{version}.{name}" in source.names]
        read = source.read([f"version.{version}.{name}" for name in stored])
        tensors = {name: parameter.data for name, parameter in parameters.items()}
        for name in stored:
            tensors[name] = torch.empty_like(tensors[name]).copy_(read[f"version.{version}.{name}"])
        older.append(tensors)
    return older


def _compared(
    ours: RunStep,
    loss: float,
    plain: PlainStep,
    context: RunContext,
    reasons: tuple[str, ...],
    take: functools.partial[PlainStep],
    settings: PlainSettings,
    *,
    compiled: bool = False,
) -> Comparison:
    """Compare the results of the run and the plain loop, with the noise of another order if bits may differ.

    ``compiled``: the run was compiled; what a compiler changes in the plain loop is noise as well.
    """
    moving = {f"{PREFIX}{name}" for name in context.graph.moving} if settings.ema else set()
    names = {*moving, *(name for name in ours.tensors if name in plain.tensors)}
    names |= {f"model.{name}" for name in context.graph.parameters}
    buffers = {f"model.{name}" for name in _buffers(context)}
    names |= buffers & plain.tensors.keys()
    noise: dict[str, float] = {}
    reordered: dict[str, float] = {}
    if reasons:
        errors = plain.errors_of(take(replace(settings, reverse=True)))
        # buffers such as means over batches change by more than rounding
        reordered = {name: error for name, error in errors.items() if name not in buffers}
        noise = dict(reordered)
    if compiled:
        reordered = _larger(reordered, plain.errors_of(take(replace(settings, enlarged=ENLARGED))))
    alone = _of_rounding_alone(reordered, context)
    reordered |= {f"model.{name}": error for name, error in alone.items()}
    if compiled:
        noise = _larger(reordered, _noise_of_compiler(plain, reordered, context, take, settings))
    owners: dict[str, int] = {}
    for stage in context.plan.stages:
        for name in (*stage.parameters, *stage.buffers):
            owners.setdefault(name, stage.index)
    differences = []
    for key in sorted(names):
        name = key.removeprefix("model.")
        run_has = ours.tensors.get(key)
        error = float("inf") if run_has is None else relative_error(run_has, plain.tensors[key])
        same = run_has is not None and sparse.equal(run_has, plain.tensors[key])
        owner, own = owners.get(name.removeprefix(PREFIX), -1), (noise.get(key, 0.0), reordered.get(key, 0.0))
        differences.append(TensorDifference(name, error, same, owner, own[0], reordered=own[1]))
    states = ours.state_differences(plain, noise, reordered)
    differences += [d for d in states if not any(f"[{name}]" in d.name for name in alone)]
    of_tensors = {key: noise[key] for key in plain.tensors if key in noise}
    precision = context.plan.workload.precision if compiled else ""
    median = usual(of_tensors, buffers, precision)
    return Comparison(tuple(differences), (loss,), (plain.loss,), not reasons, reasons, median)


def _buffers(context: RunContext) -> set[str]:
    """Return the buffers of all stages."""
    return {name for stage in context.plan.stages for name in stage.buffers}


def _noise_of_compiler(
    plain: PlainStep,
    reordered: Mapping[str, float],
    context: RunContext,
    take: functools.partial[PlainStep],
    settings: PlainSettings,
) -> dict[str, float]:
    """Return what a compiler changes in the step of the user's model."""
    if settings.order is not None and settings.order.shared:
        settings = replace(settings, order=settings.order.without_shared())
        plain = take(settings)
    try:
        compiled = take(settings, compiled=True)
    except Exception as error:  # training compiles its stages, which may succeed
        logger.info("the model cannot be compiled as a whole: %s", error)
        return plain.errors_of(take(replace(settings, within=lambda: SplitSums(2))))
    return of_compiler(plain.errors_of(compiled), reordered, context.plan.workload.precision)


def _of_rounding_alone(reordered: Mapping[str, float], context: RunContext) -> dict[str, float]:
    """Return the parameters of whose gradients only rounding is left, with its largest part in weights and states."""
    alone = {}
    for name in context.graph.parameters:
        largest = max((e for key, e in reordered.items() if key == f"model.{name}" or f"[{name}]" in key), default=0.0)
        if largest >= ROUNDING_ALONE:
            alone[name] = largest
    return alone


def _larger(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in {**one, **other}}


def _result(step: int, compared: Comparison) -> AuditResult:
    worst = max(compared.differences, key=lambda d: (not d.bitwise, d.error / allowed(compared.noise, d.noise)))
    status = EQUAL if compared.equal else DIFFERENT
    return AuditResult(
        step,
        status,
        compared.bitwise,
        worst.name,
        worst.owner,
        min(worst.error, 1e30),
        0 if compared.equal else sum(not difference.bitwise for difference in compared.differences),
        len(compared.differences),
        "; ".join(compared.reasons),
    )

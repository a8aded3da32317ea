"""The state of a stage in a checkpoint, under the model's own names.

Keys of tensors: ``model.<name>`` is a parameter or buffer, ``average.<name>`` an averaged weight,
``version.<v>.<name>`` an older weight version that a later minibatch reads. ``optimizer...`` and ``scheduler...`` are
named by ``runtime.training_state``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopipe import sparse
from autopipe.ir.plan import Plan
from autopipe.runtime.after_step.average import PREFIX
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.manifest import TrainingOptions
from autopipe.runtime.checkpoint.members import own_part
from autopipe.runtime.job import Job
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.training_state.stage import Training, restore_training
from autopipe.runtime.weights import WeightVersions


def buffers(runner: StageRunner) -> dict[str, torch.Tensor]:
    """Return the buffers of a stage, including non-persistent ones, which a forward may have changed."""
    constants = runner.stage.constants
    return {name: buffer for name, buffer in runner.stage.named_buffers() if name not in constants}


def counters(runner: StageRunner) -> set[str]:
    """Return the names in a checkpoint of the buffers that replicas do not average, such as counters of batches.

    The first replica of a stage writes them.
    """
    return {f"model.{name}" for name, buffer in buffers(runner).items() if not buffer.is_floating_point()}


def options_of(plan: Plan, job: Job) -> TrainingOptions:
    """Return the options that decide the training results, for the manifest."""
    spec = plan.workload
    return TrainingOptions(
        spec.optimizer,
        spec.lr,
        spec.precision,
        job.batch_size,
        plan.num_microbatches,
        job.clip_grad_norm,
        job.deferred_batch_norm,
        plan.schedule,
        job.ema,
        job.compile,
    )


def collect(runner: StageRunner, owned: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return the weights and buffers of a stage that a checkpoint stores. ``owned``: the parameters that it steps."""
    tensors: dict[str, torch.Tensor] = {f"model.{name}": parameter.data for name, parameter in owned.items()}
    tensors.update({f"model.{name}": buffer for name, buffer in buffers(runner).items()})
    versions = runner.versions
    for version in versions.versions:
        if version != versions.newest:
            for name, tensor in versions.tensors(version).items():
                if name in owned:
                    tensors[f"version.{version}.{name}"] = tensor
    return tensors


def restore(
    checkpoint: Checkpoint,
    runner: StageRunner,
    stepped: Mapping[str, nn.Parameter],
    optimizer: Optimizer | None,
    scheduler: LRScheduler | None,
) -> None:
    """Restore a stage from a checkpoint, which any plan may have saved. ``stepped``: what its optimizer steps.

    Raises: ArtifactError if the checkpoint lacks a tensor of this stage; RunError if the state does not fit the
    optimizer and scheduler that the hooks build now.
    """
    restore_weights(checkpoint, runner)
    own = functools.partial(own_part, runner.stage)
    restore_versions(checkpoint, runner.versions, checkpoint.manifest.step, own)
    if optimizer is not None:
        restore_training(checkpoint, Training(stepped, optimizer, scheduler), own)


def restore_weights(checkpoint: Checkpoint, runner: StageRunner, *, averaged: bool = False) -> None:
    """Restore the parameters and buffers of a stage. Raises: ArtifactError if the checkpoint lacks one.

    ``averaged``: use the average of each parameter that has one.
    """
    present = {**runner.versions.masters, **buffers(runner)}
    with_average = {name for name in present if averaged and f"{PREFIX}{name}" in checkpoint.names}
    keys = {name: f"{PREFIX if name in with_average else 'model.'}{name}" for name in present}
    tensors = checkpoint.read(list(keys.values()))
    with torch.no_grad():
        for name, tensor in present.items():
            value = own_part(runner.stage, keys[name], tensors[keys[name]])
            tensor.data = _laid_out_like(tensor, value)


def _laid_out_like(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` with the device and strides of ``like``: rounding depends on the order in memory."""
    if sparse.is_sparse(value) or sparse.is_sparse(like):
        return value.to(like.device)  # it has no strides; torch refuses another sparse layout than the model's
    return torch.empty_like(like, requires_grad=False).copy_(value)


def restore_versions(
    checkpoint: Checkpoint,
    versions: WeightVersions,
    step: int,
    own: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor,
) -> None:
    """Restore the older weight versions that later minibatches read. The masters hold version ``step``.

    ``own``: takes this member's part of a tensor.
    """
    versions.start_at(step)
    moving = versions.tensors(step)
    for back in range(1, versions.staleness + 1):
        version = step - back
        if version < 0:
            break
        # a stage without parameters has versions too, because instructions name them
        keys = {name: f"version.{version}.{name}" for name in moving}
        read = checkpoint.read(list(keys.values()))
        values = {name: own(key, read[key]) for name, key in keys.items()}
        versions.add_old(version, {name: _laid_out_like(moving[name], value) for name, value in values.items()})

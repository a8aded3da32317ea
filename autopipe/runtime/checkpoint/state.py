"""What a rank's stages put into a checkpoint and take out of it, under the model's own names.

Keys of tensors: ``model.<name>`` a parameter or buffer, ``average.<name>`` an averaged weight, ``version.<v>.<name>``
an older weight version that a later minibatch will ask for, and ``optimizer...`` and ``scheduler...`` what
``runtime.training_state`` names.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopipe import sparse
from autopipe.ir.plan import Plan
from autopipe.runtime.after_step.average import PREFIX
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.manifest import TrainingOptions
from autopipe.runtime.job import Job
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.training_state.stage import Training, restore_training, set_rate
from autopipe.runtime.weights import WeightVersions


def buffers(runner: StageRunner) -> dict[str, torch.Tensor]:
    """Return the buffers of a stage, non-persistent ones too: a forward may have changed them."""
    constants = runner.stage.constants
    return {name: buffer for name, buffer in runner.stage.named_buffers() if name not in constants}


def options_of(plan: Plan, job: Job) -> TrainingOptions:
    """Return the options that decide what is trained, for the manifest."""
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
    )


def collect(runner: StageRunner, owned: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return the weights and buffers of a stage that a checkpoint holds. ``owned``: what this stage steps."""
    tensors: dict[str, torch.Tensor] = {f"model.{name}": parameter.data for name, parameter in owned.items()}
    tensors.update({f"model.{name}": buffer for name, buffer in buffers(runner).items()})
    versions = runner.versions
    for version in versions.versions:
        if version != versions.newest:
            for name, tensor in versions.tensors(version).items():
                if name in owned:
                    tensors[f"version.{version}.{name}"] = tensor
    return tensors


def bits(tensor: torch.Tensor) -> int:
    """Return a sum of a tensor's bit patterns: one pass, and another one for all but contrived differences."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.detach().contiguous().view(whole).sum(dtype=torch.int64))


def restore(
    checkpoint: Checkpoint,
    runner: StageRunner,
    owned: Mapping[str, nn.Parameter],
    optimizer: Optimizer | None,
    scheduler: LRScheduler | None,
    learning_rate: float | None = None,
) -> None:
    """Bring a stage to the state of a checkpoint, which any plan may have saved.

    ``learning_rate``: given with ``--resume``, in place of the one in the checkpoint.

    Raises: ArtifactError where the checkpoint lacks a tensor of this stage; RunError where the optimizer's state has
    no place in what the hooks build now.
    """
    restore_weights(checkpoint, runner)
    restore_versions(checkpoint, runner.versions, checkpoint.manifest.step)
    if optimizer is not None:
        restore_training(checkpoint, Training(owned, optimizer, scheduler))
        if learning_rate is not None:
            set_rate(optimizer, learning_rate)


def restore_weights(checkpoint: Checkpoint, runner: StageRunner, *, averaged: bool = False) -> None:
    """Bring the parameters and buffers of a stage to a checkpoint's. Raises: ArtifactError where it lacks one.

    ``averaged``: to the averages of the parameters that have one.
    """
    present = {**runner.versions.masters, **buffers(runner)}
    with_average = {name for name in present if averaged and f"{PREFIX}{name}" in checkpoint.names}
    keys = {name: f"{PREFIX if name in with_average else 'model.'}{name}" for name in present}
    tensors = checkpoint.read(list(keys.values()))
    with torch.no_grad():
        for name, tensor in present.items():
            tensor.data = _laid_out_like(tensor, tensors[keys[name]])


def _laid_out_like(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` on the device and with the strides of ``like``: kernels round by the order in memory."""
    if sparse.is_sparse(value) or sparse.is_sparse(like):
        return value.to(like.device)  # no strides; one that is stored otherwise than the model's is refused by torch
    return torch.empty_like(like, requires_grad=False).copy_(value)


def restore_versions(checkpoint: Checkpoint, versions: WeightVersions, step: int) -> None:
    """Take over the masters' version and the older ones that later minibatches will ask for."""
    versions.start_at(step)
    moving = versions.tensors(step)
    for back in range(1, versions.staleness + 1):
        version = step - back
        if version < 0:
            break
        # a stage without parameters holds its versions too: instructions name them
        read = checkpoint.read([f"version.{version}.{name}" for name in moving])
        versions.add_old(version, {n: _laid_out_like(moving[n], read[f"version.{version}.{n}"]) for n in moving})

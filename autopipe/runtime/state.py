"""What a rank's stages put into a checkpoint and take out of it, under the model's own names.

Keys: ``model.<name>`` a parameter or buffer, ``optimizer.<name>.<slot>`` the optimizer's tensors,
``version.<v>.<name>`` an older weight version that a later minibatch will ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopipe.runtime.checkpoint import Checkpoint
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.weights import WeightVersions


def buffers(runner: StageRunner) -> dict[str, torch.Tensor]:
    """Return the buffers of a stage, non-persistent ones too: a forward may have changed them."""
    constants = runner.stage.constants
    return {name: buffer for name, buffer in runner.stage.named_buffers() if name not in constants}


def collect(
    runner: StageRunner, owned: Mapping[str, nn.Parameter], optimizer: Optimizer | None
) -> dict[str, torch.Tensor]:
    """Return every tensor of a stage that a checkpoint holds. ``owned``: the parameters that this stage steps."""
    tensors: dict[str, torch.Tensor] = {f"model.{name}": parameter.data for name, parameter in owned.items()}
    tensors.update({f"model.{name}": buffer for name, buffer in buffers(runner).items()})
    versions = runner.versions
    for version in versions.versions:
        if version != versions.newest:
            for name, tensor in versions.tensors(version).items():
                if name in owned:
                    tensors[f"version.{version}.{name}"] = tensor
    if optimizer is not None:
        names = {id(parameter): name for name, parameter in owned.items()}
        for parameter, slots in optimizer.state.items():
            for slot, value in slots.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer.{names[id(parameter)]}.{slot}"] = value
                elif isinstance(value, (int, float)):
                    tensors[f"optimizer.{names[id(parameter)]}.{slot}"] = torch.tensor(value)
    return tensors


def bits(tensor: torch.Tensor) -> int:
    """Return a sum of a tensor's bit patterns: one pass, and another one for all but contrived differences."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.detach().contiguous().view(whole).sum(dtype=torch.int64))


def groups(owned: Mapping[str, nn.Parameter], optimizer: Optimizer | None) -> dict[str, dict[str, float]]:
    """Return the numbers of each parameter's optimizer group (lr, weight_decay, ...), which schedulers change."""
    if optimizer is None:
        return {}
    names = {id(parameter): name for name, parameter in owned.items()}
    found: dict[str, dict[str, float]] = {}
    for group in optimizer.param_groups:
        numbers = {key: float(value) for key, value in group.items() if type(value) in (int, float)}
        for parameter in group["params"]:
            found[names[id(parameter)]] = numbers
    return found


def scheduler_numbers(scheduler: LRScheduler | None) -> dict[str, float]:
    """Return the numbers of a scheduler's state; the rest of it is rebuilt by the user's own hook."""
    state: dict[str, Any] = {} if scheduler is None else scheduler.state_dict()
    return {key: float(value) for key, value in state.items() if type(value) in (int, float)}


def restore(
    checkpoint: Checkpoint,
    runner: StageRunner,
    owned: Mapping[str, nn.Parameter],
    optimizer: Optimizer | None,
    scheduler: LRScheduler | None,
) -> None:
    """Bring a stage to the state of a checkpoint, which any plan may have saved.

    Raises: ArtifactError where the checkpoint lacks a tensor of this stage.
    """
    held = buffers(runner)
    names = [f"model.{name}" for name in (*runner.versions.masters, *held)]
    tensors = checkpoint.read(names)
    step = checkpoint.manifest.step
    with torch.no_grad():
        for name, tensor in {**runner.versions.masters, **held}.items():
            tensor.data = _laid_out_like(tensor, tensors[f"model.{name}"])
    restore_versions(checkpoint, runner.versions, step)
    if optimizer is not None:
        _restore_optimizer(checkpoint, owned, optimizer)
    if scheduler is not None:
        state = scheduler.state_dict()
        numbers = {k: type(state[k])(v) for k, v in checkpoint.scheduler.items() if k in state}
        scheduler.load_state_dict({**state, **numbers})


def _laid_out_like(like: torch.Tensor, value: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return ``value`` on the device and with the strides of ``like``: kernels round by the order in memory."""
    return torch.empty_like(like, dtype=dtype or like.dtype, requires_grad=False).copy_(value)


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


def _restore_optimizer(checkpoint: Checkpoint, owned: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
    prefix = "optimizer."
    slots: dict[str, list[str]] = {}
    for key in checkpoint.names:
        if key.startswith(prefix):
            name, _, slot = key[len(prefix) :].rpartition(".")
            slots.setdefault(name, []).append(slot)
    names = {id(parameter): name for name, parameter in owned.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            read = checkpoint.read([f"{prefix}{name}.{slot}" for slot in slots.get(name, [])])
            for slot, tensor in ((key.rpartition(".")[2], tensor) for key, tensor in read.items()):
                # AdamW keeps its step count on the CPU, whatever the device of the parameter
                target = tensor if tensor.dim() == 0 else tensor.to(parameter.device)
                if target.shape == parameter.shape:
                    target = _laid_out_like(parameter, target, target.dtype)
                optimizer.state[parameter][slot] = target
            for key, value in checkpoint.groups.get(name, {}).items():
                if key in group:
                    group[key] = type(group[key])(value)

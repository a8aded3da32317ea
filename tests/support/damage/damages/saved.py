"""Damage to what a checkpoint is made of: collected, copied and written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from support.damage.damages.gradients import ONE
from support.damage.registry import Ran, damages


@damages("runtime.checkpoint.state", "collect")
def save_wrong(collect: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Write one weight wrongly."""

    def damaged(runner: Any, owned: Any) -> Any:
        tensors = collect(runner, owned)
        for name in ONE:
            if f"model.{name}" in tensors:
                ran()
                tensors[f"model.{name}"] = tensors[f"model.{name}"] * 1.01
        return tensors

    return damaged


@damages("runtime.checkpoint.state", "collect")
def save_without(collect: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Leave the running statistics out."""

    def damaged(runner: Any, owned: Any) -> Any:
        tensors = collect(runner, owned)
        if any("running_" in name for name in tensors):
            ran()
        return {name: tensor for name, tensor in tensors.items() if "running_" not in name}

    return damaged


@damages("runtime.training_state.stage", "Training.state")
def save_other_state(state: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Write the first averages of the gradients as they are at the start."""

    def damaged(self: Any, place: str, initial: Any) -> Any:
        stored, tensors = state(self, place, initial)
        first = [name for name in tensors if name.endswith("['exp_avg']")]
        if first:
            ran()
        return stored, {**tensors, **{name: tensors[name] * 0 for name in first}}

    return damaged


@damages("runtime.checkpoint.snapshot", "Snapshot.take")
def save_late(take: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Copy after the weights have changed: by one more step of weight decay."""

    def damaged(self: Any, tensors: Any) -> None:
        changed = {name: tensor * 0.999 if name.endswith("fc2.weight") else tensor for name, tensor in tensors.items()}
        if any(changed[name] is not tensor for name, tensor in tensors.items()):
            ran()
        take(self, changed)

    return damaged


@damages("runtime.checkpoint.snapshot", "Snapshot.write")
def save_flipped(write: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Flip a bit of the file, with the SHA-256 of what was flipped."""

    def damaged(self: Any, path: Path) -> Any:
        for copy in self._copies.values():
            if copy.numel() > 1:
                ran()
                copy.view(-1).view(torch.uint8)[copy.nbytes // 2] ^= 1
                break
        write(self, path)

    return damaged


@damages("runtime.checkpoint.state", "buffers")
def buffers_unreported(buffers: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Leave the running statistics out of what a stage reports, with nothing at saving that sees it."""

    def damaged(runner: Any) -> Any:
        reported = {name: buffer for name, buffer in buffers(runner).items() if "running_" not in name}
        if len(reported) < len(buffers(runner)):
            ran()
        return reported

    return damaged


@damages("runtime.checkpoint.saver", "refuse_missing", "buffers_unreported")
def _not_refused(refuse_missing: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    return lambda *_: None

"""Build the ``Spiller`` of a rank from its stages and their optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.utils import _pytree as pytree

from autopipe.errors import PlanError
from autopipe.ir.plan import Plan
from autopipe.runtime.spans import SpanRecorder
from autopipe.runtime.spilling.memory_ledger import DeviceBooks
from autopipe.runtime.spilling.spiller import Spiller
from autopipe.runtime.spilling.stage_memory import SpilledPart, refuse_unmovable
from autopipe.runtime.spilling.token import DeviceToken
from autopipe.runtime.step.stepper import Stepper
from autopipe.schedules.spilling.spill import OPTIMIZER_SLABS


def steps_late(precision: str, clip_grad_norm: float, on_nonfinite: str) -> bool:
    """Return whether stages agree on something before any of them steps."""
    return bool(clip_grad_norm) or on_nonfinite == "skip" or precision == "fp16"


def refuse_unspillable(plan: Plan, stepper: Stepper) -> None:
    """Refuse what stages that take turns on a device cannot do.

    Raises: PlanError.
    """
    if any(stage.recompute != "stage" for stage in plan.stages):
        raise PlanError(
            "a spilled stage must recompute its forward: its weights leave the device before its backward",
            remedy="--recompute auto",
        )
    if stepper.users_hook is not None and stepper.users_hook.exchanges:
        raise PlanError(
            "after_step reads parameters of several stages, and with the schedule spilled they are not on the device "
            "at one time",
            remedy="let after_step use one layer at a time, or choose another schedule",
        )


def build_spiller(
    plan: Plan,
    stepper: Stepper,
    device: torch.device,
    books: DeviceBooks | None,
    recorder: SpanRecorder | None,
    token: DeviceToken | None = None,
) -> Spiller:
    """Return the spiller, with the weights of all stages in its host memory. ``token``: of a shared device.

    Raises: PlanError as ``refuse_unspillable`` does; RunError for a parameter that cannot be moved.
    """
    refuse_unspillable(plan, stepper)
    register = books.owners.exclude if books is not None and device.type == "cpu" else _ignore
    parts = {}
    for stage, runner in stepper.runners.items():
        parameters = list(runner.versions.masters.values())
        refuse_unmovable(stage, parameters, runner.stage.buffers())
        if books is not None:
            books.count(stage, runner.stage.buffers(), sum(p.numel() * p.element_size() for p in parameters))
        parts[stage] = SpilledPart(
            stage,
            parameters,
            _slots(stepper, stage),
            pinned=device.type == "cuda",
            register=register,
            drop_casts=runner.versions.drop_casts,
        )
    slabs = plan.schedule_options.get(OPTIMIZER_SLABS.name, OPTIMIZER_SLABS.default)
    spiller = Spiller(parts, device, optimizer_slabs=slabs, recorder=recorder, register=register, token=token)
    stepper.ties.moved = spiller
    return spiller


def _ignore(_: torch.Tensor) -> None:
    pass


def _slots(stepper: Stepper, stage: int) -> Callable[[], list[torch.Tensor]]:
    def tensors() -> Iterator[torch.Tensor]:
        optimizer = stepper.optimizers[stage]
        if optimizer is not None:
            for state in optimizer.state.values():
                yield from (leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor))
        if stepper.averages is not None:
            yield from stepper.averages.of(stage).values()

    return lambda: list(tensors())

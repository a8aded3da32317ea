"""Damage to the weight versions of schedules with staleness, to averages, and to the memory of spilled stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.damage.registry import Ran, damages

END = "runtime.weights", "WeightVersions.end_step"


@damages(*END)
def version_newer(end_step: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Let all versions have the newest values."""

    def damaged(self: Any) -> None:
        end_step(self)
        for leaves in self._leaves.values() if self.staleness else ():
            for name, leaf in leaves.items():
                ran()
                leaf.data = self._leaves[self.newest][name].data

    return damaged


@damages(*END)
def version_older(end_step: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Read a version that is older by one than the schedule says, from the third minibatch on."""
    right: dict[tuple[int, str], Any] = {}

    def damaged(self: Any) -> None:
        first = {name: leaf.data for name, leaf in self._leaves.get(0, {}).items()}
        end_step(self)
        for name, leaf in self._leaves[self.newest].items() if self.staleness else ():
            before = right.get((id(self), name), first.get(name))
            right[id(self), name] = leaf.data
            if before is not None:
                ran()
                leaf.data = before

    return damaged


# -- averages ----------------------------------------------------------------------------------------------------------


@damages("runtime.after_step.average", "Averages.update")
def ema_off(update: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Do not update averages after the first step."""

    def damaged(self: Any, stage: int) -> None:
        if self._values[stage]:
            ran()
            return
        update(self, stage)

    return damaged


@damages("runtime.after_step.average", "Averages.update")
def ema_decay(update: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Average with another decay."""

    def damaged(self: Any, stage: int) -> None:
        ran()
        decay, self.decay = self.decay, self.decay * 0.99
        update(self, stage)
        self.decay = decay

    return damaged


# -- spilled stages ----------------------------------------------------------------------------------------------------


@damages("runtime.spilling.stage_memory", "SpilledPart.weights_home")
def spill_old(weights_home: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Do not write stepped weights to the host."""

    def damaged(self: Any, slab: Any, *, changed: bool) -> Any:
        if changed:
            ran()
        return weights_home(self, slab, changed=False)

    return damaged


@damages("runtime.spilling.stage_memory", "SpilledPart.slots_home")
def spill_opt_old(slots_home: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Do not write the optimizer state to the host."""

    def damaged(self: Any, slab: Any) -> Any:
        ran()
        slots_home(self, slab)
        return []

    return damaged

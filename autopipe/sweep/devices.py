"""The devices of a sweep: GPUs of this machine, or on a CPU as many ranks as may run at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.cores import usable_cores
from autopipe.errors import RunError, counted
from autopipe.sweep.file import SweepJob


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that the jobs share."""

    indices: tuple[int, ...]
    are_gpus: bool

    def visible(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """Return the GPUs that a process may see; () on a CPU, where every process may use all cores."""
        return tuple(chosen) if self.are_gpus else ()


def find_devices(wanted: int | tuple[int, ...] | None, jobs: Sequence[SweepJob], where: str) -> Devices:
    """Return the devices. ``wanted``: their number, or which; None: all GPUs, or one for each core of the CPU.

    Raises: RunError if there are fewer GPUs, or a job needs more devices.
    """
    on_cpu = all(job.options.get("device") == "cpu" for job in jobs)
    gpus = 0 if on_cpu else _gpus()
    available = gpus or usable_cores()
    indices = tuple(range(available)) if wanted is None else _indices(wanted)
    if gpus and (missing := [index for index in indices if index >= gpus]):
        raise RunError(
            f"there is no GPU {missing[0]} on this machine; it has {counted(gpus, 'GPU')}",
            where=where,
            remedy="name GPUs counted from 0, or a smaller number: --devices",
        )
    for job in jobs:
        if job.devices > len(indices):
            raise RunError(
                f"{job.name} needs {counted(job.devices, 'device')}, and the sweep has {len(indices)}",
                where=f"{where}: {job.place}.gpus",
                remedy="give the sweep more devices (devices = ..., or --devices), or the job fewer",
            )
    return Devices(indices, bool(gpus))


def as_visible(chosen: Sequence[int], before: str) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES that shows only some GPUs. ``before``: its value, "" for all GPUs.

    The indices count the GPUs that were visible, which the variable may name by their UUIDs.
    """
    visible = [name.strip() for name in before.split(",") if name.strip()]
    return ",".join(visible[index] if visible else str(index) for index in chosen)


def _indices(wanted: int | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(range(wanted)) if isinstance(wanted, int) else wanted


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0

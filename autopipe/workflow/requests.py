"""``PlanRequest``: what a stored plan was asked for, so that a later option can be seen to contradict it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from autopipe.ir.cluster import Cluster
from autopipe.planning import read_cluster
from autopipe.workflow.settings import PlanSettings

_OPTIONS = {
    "gpus": "--gpus",
    "batch_size": "--batch-size",
    "schedule": "--schedule",
    "num_microbatches": "--num-microbatches",
    "microbatch_size": "--microbatch-size",
    "recompute": "--recompute",
    "cluster": "--cluster",
    "gpu_memory_bytes": "--gpu-memory",
    "link": "--link",
    "replicas": "--replicas",
    "device_name": "--device-name",
}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The options of a plan; None is *not said*. ``cluster``: what the cluster file held."""

    gpus: int | None = None
    batch_size: int | None = None
    schedule: str | None = None
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    recompute: str | None = None
    cluster: Cluster | None = None
    gpu_memory_bytes: int | None = None
    link: float | None = None
    replicas: str | None = None
    device_name: str | None = None

    @property
    def of_other_devices(self) -> bool:
        """Whether the devices or links are described, and need not be here."""
        return any(x is not None for x in (self.cluster, self.gpu_memory_bytes, self.link, self.device_name))

    @staticmethod
    def of(settings: PlanSettings) -> PlanRequest:
        """Return what the user said. Raises: PlanError where the cluster file is not one."""
        figures = settings.cluster
        return PlanRequest(
            settings.gpus,
            settings.batch_size,
            settings.schedule,
            settings.num_microbatches,
            settings.microbatch_size,
            settings.recompute,
            None if figures.file is None else read_cluster(figures.file),
            figures.gpu_memory_bytes,
            figures.link,
            settings.replicas,
            figures.device_name,
        )

    def overlaid(self, said: PlanRequest) -> PlanRequest:
        """Return this request with what is said now on top. The two ways to name microbatches exclude each other."""
        given = {field.name: getattr(said, field.name) for field in dataclasses.fields(said)}
        changes = {name: value for name, value in given.items() if value is not None}
        if said.num_microbatches is not None:
            changes["microbatch_size"] = None
        elif said.microbatch_size is not None:
            changes["num_microbatches"] = None
        if said.cluster is not None:
            changes |= dict.fromkeys(("gpu_memory_bytes", "link", "device_name"))
        elif said.of_other_devices:
            changes["cluster"] = None
        return dataclasses.replace(self, **changes)

    def changes_to(self, other: PlanRequest) -> tuple[str, ...]:
        """Return what differs, as the user would write it: ``--gpus 2 -> 4``."""
        found = []
        for name, option in _OPTIONS.items():
            before, after = getattr(self, name), getattr(other, name)
            if before != after:
                found.append(option if name == "cluster" else f"{option} {_shown(before)} -> {_shown(after)}")
        return tuple(found)


def _shown(value: object) -> str:
    return "unset" if value is None else str(value)

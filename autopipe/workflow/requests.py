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
            changes |= {"gpu_memory_bytes": said.gpu_memory_bytes, "link": said.link}
        elif said.gpu_memory_bytes is not None or said.link is not None:
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

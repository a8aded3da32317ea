"""``Prepared``: what a run needs, after the model was measured, planned and written as stages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from autopipe.commands.settings import MAX_SHAPES
from autopipe.commands.store import PlanRecord
from autopipe.ir.cluster import Cluster
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.schedules import REGISTRY
from autopipe.workload import Workload


@dataclass(frozen=True, slots=True)
class Prepared:
    """The inputs of a run."""

    workload: Workload
    graph: Graph
    profile: Profile
    record: PlanRecord
    plan: Plan
    stages: Path
    notes: tuple[str, ...] = ()  # work that was done or reused
    warnings: tuple[str, ...] = ()  # about the model
    evaluation_note: str = ""  # the reason why the stages cannot evaluate, or ""
    max_shapes: int = MAX_SHAPES  # how many further shapes of batches may be captured while ranks run
    allow_data_dependent: bool = False  # in those captures
    placeholders: nn.Module | None = None  # a large model, with placeholders for its weights
    unchanged: bool = False  # nothing of the model has changed since an earlier command

    @property
    def device_budget_bytes(self) -> int:
        """The memory that a device on which stages take turns may use; 0: all of it."""
        return (self.record.request.gpu_memory_bytes or 0) if REGISTRY[self.plan.schedule].spills else 0

    @property
    def cluster(self) -> Cluster:
        """The devices and links of the ranks."""
        return self.record.cluster

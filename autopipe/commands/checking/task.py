"""A comparison as a task: what is compared, and all that another process needs to do it. Both cross as JSON values."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopipe.commands.prepared import Prepared
from autopipe.commands.store import PlanRecord
from autopipe.ir import artifact, decoding
from autopipe.ir.graph import Graph
from autopipe.ir.initial_values import InitialValues
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.report.results import FullBatchReport
from autopipe.verify.comparison import Comparison
from autopipe.workload import Workload
from autopipe.workload.cutting.dimensions import Minibatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is compared."""

    # optimizer steps
    steps: int
    # fields of ``Job``
    clip_grad_norm: float = 0.0
    deferred_batch_norm: bool = False
    ema: float = 0.0
    compile: bool = False
    # an evaluation, too
    evaluate: bool = False
    # also the microbatches with a full batch: its "gradient", or that and one optimizer "step"; "": neither
    full_batch: str = ""
    # with some of the model's blocks: the complete model does not fit beside the ranks
    some_blocks: bool = False
    # the folder for temporary files; "": the usual one
    scratch: str = ""


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of a comparison, or the reason why it was left out."""

    # None: it does not fit into memory
    comparison: Comparison | None
    # why it ran on another device than that of the ranks, or was left out; else ""
    note: str = ""
    full_batch: FullBatchReport | None = None
    # with which blocks, in words, if the comparison with the complete model does not fit; else ""
    part: str = ""

    def encode(self) -> dict[str, Any]:
        """Return the fields as JSON values. Losses and errors may be NaN or infinite."""
        return dataclasses.asdict(self)

    @staticmethod
    def decode(values: Any) -> Compared:
        """Return what ``encode`` encoded."""
        compared: Compared = _rebuilt(Compared, values)
        return compared


@dataclass(frozen=True, slots=True)
class ComparisonTask:
    """A comparison of a prepared run, for another process."""

    wanted: Wanted
    graph: Graph
    profile: Profile
    record: PlanRecord
    plan: Plan
    stages: str
    max_shapes: int
    allow_data_dependent: bool
    minibatch: Minibatch | None
    # see ``ModelFactory.initial``
    initial: InitialValues

    @staticmethod
    def of(prepared: Prepared, wanted: Wanted) -> Any:
        """Return the task as JSON values."""
        workload = prepared.workload
        task = ComparisonTask(
            wanted,
            prepared.graph,
            prepared.profile,
            prepared.record,
            prepared.plan,
            str(prepared.stages),
            prepared.max_shapes,
            prepared.allow_data_dependent,
            workload.batches.minibatch,
            workload.models.initial,
        )
        return artifact.encode(task)

    @staticmethod
    def decode(values: Any) -> ComparisonTask:
        """Return the task that ``of`` encoded."""
        task: ComparisonTask = decoding.decode(ComparisonTask, values, "task")
        return task

    def prepared(self) -> Prepared:
        """Load the model in this process, and return the prepared run. Raises: ModelFileError."""
        workload = Workload.from_spec(self.plan.workload)
        workload.batches.minibatch = self.minibatch
        workload.models.initial = self.initial
        return Prepared(
            workload=workload,
            graph=self.graph,
            profile=self.profile,
            record=self.record,
            plan=self.plan,
            stages=Path(self.stages),
            max_shapes=self.max_shapes,
            allow_data_dependent=self.allow_data_dependent,
        )


def _rebuilt(kind: Any, value: Any) -> Any:
    """Return what ``dataclasses.asdict`` took apart. Unlike ``artifact.decode``, numbers need not be finite."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _rebuilt(hints[name], field) for name, field in value.items()})
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return tuple(_rebuilt(arguments[0], item) for item in value)
    if typing.get_origin(kind) in (types.UnionType, typing.Union) and value is not None:
        return _rebuilt(next(option for option in arguments if option is not types.NoneType), value)
    return value

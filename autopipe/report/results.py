"""What each command answers with: the values behind ``--json`` and the tables. The key names are a contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopipe.ir.cluster import Cluster
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.ir.timeline import Timeline
from autopipe.planning import Comparison, Explanation

if TYPE_CHECKING:  # its search loads numba, which takes its time
    from autopipe.planning.pipedream.file_format import LayerGraph
    from autopipe.planning.pipedream.model import LayerPlan


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """``path``: the file. ``notes``: what was done or reused. ``warnings``: what is to know of the model."""

    profile: Profile
    path: str
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanResult:
    """``planning_seconds``: of the search alone. ``comparison``: None where it was interrupted.

    ``explanation``: None where it was not asked for.
    """

    plan: Plan
    profile: Profile
    cluster: Cluster
    path: str
    planning_seconds: float
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    comparison: Comparison | None = None
    explanation: Explanation | None = None


@dataclass(frozen=True, slots=True)
class LayerPlanResult:
    """A plan under PipeDream's formulas. ``alone_seconds``, ``parallel_seconds``: one device, data parallelism."""

    name: str
    layers: LayerGraph
    plan: LayerPlan
    cluster: Cluster
    alone_seconds: float
    parallel_seconds: float
    planning_seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """The best plan for ``gpus`` devices, or why there is none. ``device_hours``: of a million samples."""

    gpus: int
    plan: Plan | None
    device_hours: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Scaling:
    """Step time and cost against the number of devices."""

    name: str
    batch_size: int
    points: tuple[ScalingPoint, ...]
    planning_seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """``files``: in stage order."""

    plan: Plan
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SimulateResult:
    """``grid``: the schedule as text, one row a rank. ``trace``: the file for Perfetto, "" where none was asked for.

    ``timeline``: of one minibatch, which finds the pipeline empty. That is a step of a schedule with a flush; of one
    without (``overlaps``) it is the first minibatch alone, and ``plan.predicted`` is of the steady state behind it.
    ``reordered``: the options that name the schedule, where it is not the plan's. ``misfit``: what does not fit the
    memory of ``cluster``, "" where all does.
    """

    plan: Plan
    cluster: Cluster
    timeline: Timeline
    grid: str
    path: str
    notes: tuple[str, ...] = ()
    trace: str = ""
    overlaps: bool = False
    reordered: str = ""
    misfit: str = ""


@dataclass(frozen=True, slots=True)
class ParameterError:
    """How far one parameter is from plain training. ``error``: the largest relative one; ``owner``: its stage.

    ``order``: by how much the plan's order of sums differs from one process's, 0 where it is the same;
    ``order_gradient``: the same of the first step's gradient, ``order_weight``: of the weight after the last step.
    ``gradient``: the largest relative error of its gradients.
    """

    name: str
    error: float
    owner: int
    order: float = 0.0
    order_gradient: float = 0.0
    order_weight: float = 0.0
    gradient: float = 0.0


@dataclass(frozen=True, slots=True)
class FullBatchParameter:
    """How far microbatches are from the whole batch: the gradient, and the weight after a step. None: not a number."""

    name: str
    gradient_error: float | None
    weight_error: float | None


@dataclass(frozen=True, slots=True)
class FullBatchReport:
    """The plain loop that a plan is compared with, beside the step of one whole batch.

    ``samples``: in each microbatch. ``error``: of the gradient, relative to its size; None where it is not a number.
    ``divisor``: what microbatches are weighted by. ``statistics``: layers that take statistics of each microbatch.
    ``parameters``: where they were asked for (``--full-batch``). ``reason``: why nothing was compared, else "".
    """

    microbatches: int
    samples: tuple[int, ...]
    error: float | None
    divisor: str
    statistics: tuple[str, ...] = ()
    parameters: tuple[FullBatchParameter, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """``bitwise``: not one bit differs from a plain loop. ``equal``: that, or as close as can be promised.

    The plain loop adds up in the plan's order. ``orders``: why that is not one process's, empty where it is;
    ``order_error``: by how much the two differ. ``gradient_error``: the largest error of a gradient.
    ``tolerance``, ``gradient_tolerance``: the largest differences that were allowed (``ir.rounding``), 0 where every
    bit has to agree.
    ``cause``: why it is not equal, where, and what to do about it.
    ``modules``: what each stage runs in the words of the model.
    ``nonfinite``: what is no finite number, and so proves nothing; "" where all is. ``full_batch``: what the loop is
    beside the step of one whole batch.
    """

    equal: bool
    bitwise: bool
    max_relative_error: float
    parameters: tuple[ParameterError, ...]
    warnings: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()
    reference_losses: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    nonfinite: str = ""
    orders: tuple[str, ...] = ()
    order_error: float = 0.0
    cause: str = ""
    gradient_error: float = 0.0
    tolerance: float = 0.0
    gradient_tolerance: float = 0.0
    full_batch: FullBatchReport | None = None
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Restart:
    """A failure that a run went on after. ``number`` counts from 1. ``rank``, ``what``, ``where``: of the failure.

    ``reached``: how many steps were done when it came. ``from_step``: where the run went on. ``ranks``: on how many.
    """

    number: int
    rank: int
    what: str
    where: str
    reached: int
    from_step: int
    ranks: int


@dataclass(frozen=True, slots=True)
class StagePeak:
    """Memory of one stage on one rank. ``bytes``: at most; ``held_bytes``: with nothing in flight, at the end.

    ``weight_bytes``: of one version; ``versions``, ``in_flight``: the most of them, and of microbatches, at once.
    ``planned_bytes``: what the plan says of ``bytes``.
    """

    stage: int
    rank: int
    bytes: int
    held_bytes: int
    weight_bytes: int
    versions: int
    in_flight: int
    planned_bytes: int


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Minibatch ``step`` (from 0) computed again by the plain loop, from the run's own weights.

    ``bitwise``: not one bit differs. ``max_relative_error``: of any tensor behind the step. ``seconds``: of CPU time.
    """

    step: int
    equal: bool
    bitwise: bool
    max_relative_error: float
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainResult:
    """``losses``: one an optimizer step. ``stopped``: it was asked to stop and wrote a checkpoint (exit code 75).

    ``ranks``, ``schedule``, ``stages``: of the last attempt. ``step``: optimizer steps of the whole run so far.
    ``predicted_samples_per_second``: what the plan of the last attempt said.
    ``skipped``: the steps that were left out because they were not finite. ``peaks``: where memory was measured.
    ``audits``: in the order of their ends. ``modules``: what each stage runs in the words of the model.
    """

    losses: tuple[float, ...]
    steps: int
    seconds: float
    samples_per_second: float
    ranks: int
    schedule: str
    stages: int
    run_dir: str
    checkpoint: str
    stopped: bool = False
    notes: tuple[str, ...] = ()
    restarts: tuple[Restart, ...] = ()
    step: int = 0
    skipped: tuple[int, ...] = ()
    peaks: tuple[StagePeak, ...] = ()
    audits: tuple[AuditReport, ...] = ()
    predicted_samples_per_second: float = 0.0
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EvaluateResult:
    """The mean loss over all evaluation data."""

    loss: float
    samples: int
    batches: int
    seconds: float
    run_dir: str
    step: int


@dataclass(frozen=True, slots=True)
class ExportResult:
    """A file or folder with every parameter and buffer under the model's own names."""

    path: str
    tensors: int
    bytes: int
    step: int
    run_dir: str
    format: str = ""


@dataclass(frozen=True, slots=True)
class PlainResult:
    """A script that was written. ``steps``: that it trains; ``lines``: of the file; ``notes``: what differs from it."""

    path: str
    steps: int
    lines: int
    notes: tuple[str, ...] = ()

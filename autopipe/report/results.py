"""The results of the commands. ``--json`` and the tables are made from them. The field names are stable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autopipe.ir.cluster import Cluster
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.ir.timeline import Timeline
from autopipe.planning import Comparison, Explanation


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """The result of ``profile``."""

    profile: Profile
    path: str  # of the file
    notes: tuple[str, ...] = ()  # work that was done or reused
    warnings: tuple[str, ...] = ()  # about the model


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The result of ``plan``."""

    plan: Plan
    profile: Profile
    cluster: Cluster
    path: str  # of the file
    planning_seconds: float  # of the search alone
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    comparison: Comparison | None = None  # None if it was interrupted
    explanation: Explanation | None = None  # None if it was not requested
    question: str = ""  # why no run uses the plan, or "": it is for devices that this machine does not have


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """The best plan for a number of devices, or the reason why none fits."""

    gpus: int
    plan: Plan | None
    device_hours: float  # of a million samples
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Scaling:
    """Step time and cost for each number of devices."""

    name: str
    batch_size: int
    points: tuple[ScalingPoint, ...]
    planning_seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """The result of ``generate``."""

    plan: Plan
    files: tuple[str, ...]  # in stage order
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SimulateResult:
    """The result of ``simulate``."""

    plan: Plan  # with the prediction of a step; of the steady state if steps overlap
    cluster: Cluster
    timeline: Timeline  # of one minibatch, starting with an empty pipeline
    grid: str  # the schedule as text, one row per rank
    path: str
    notes: tuple[str, ...] = ()
    trace: str = ""  # the file for Perfetto; "" if none was requested
    overlaps: bool = False  # the schedule does not flush: the timeline is of the first minibatch alone
    schedule_options: str = ""  # the options that select the schedule, if it is not the plan's
    memory_shortfall: str = ""  # the memory shortfall on ``cluster``; "" if the plan fits


@dataclass(frozen=True, slots=True)
class ParameterError:
    """The differences between one parameter and plain training."""

    name: str
    error: float  # the largest relative error of the parameter
    owner: int  # its stage
    order: float = 0.0  # the difference between the plan's order of sums and one process's; 0 if it is the same
    order_gradient: float = 0.0  # the same for the gradient of the first step
    order_weight: float = 0.0  # the same for the weight after the last step
    gradient: float = 0.0  # the largest relative error of its gradients


@dataclass(frozen=True, slots=True)
class FullBatchParameter:
    """The differences between microbatches and the full batch, for one parameter. None: not a number."""

    name: str
    gradient_error: float | None
    weight_error: float | None  # after one step


@dataclass(frozen=True, slots=True)
class FullBatchReport:
    """A comparison of the plain loop over microbatches with one step of the full batch."""

    microbatches: int
    samples: tuple[int, ...]  # in each microbatch
    error: float | None  # of the gradient, relative to its size; None: not a number
    divisor: str  # the quantity by which microbatches are weighted
    statistics: tuple[str, ...] = ()  # layers that use statistics of each microbatch
    parameters: tuple[FullBatchParameter, ...] = ()  # only with --full-batch
    reason: str = ""  # the reason why nothing was compared
    fault: str = ""  # the factors of the microbatches are wrong


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of ``check``: a comparison with the plain loop, which sums in the plan's order."""

    equal: bool  # bitwise, or within the tolerances
    bitwise: bool  # no bit differs from the plain loop
    max_relative_error: float
    parameters: tuple[ParameterError, ...]
    warnings: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()
    reference_losses: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    nonfinite: str = ""  # the value that is not finite, so that the comparison proves nothing; "" if all are finite
    orders: tuple[str, ...] = ()  # the reasons why the plan's order of sums differs from that of one process
    order_error: float = 0.0  # the difference between the two orders
    cause: str = ""  # of an inequality, with its location and a remedy
    gradient_error: float = 0.0  # the largest error of a gradient
    tolerance: float = 0.0  # the largest error allowed (``ir.rounding``); 0 if every bit must agree
    gradient_tolerance: float = 0.0  # the same for gradients
    full_batch: FullBatchReport | None = None
    modules: tuple[str, ...] = ()  # by stage, the names of its modules


@dataclass(frozen=True, slots=True)
class Restart:
    """A failure after which a run resumed."""

    number: int  # from 1
    rank: int  # that failed
    what: str  # the failure
    where: str
    reached: int  # steps done before the failure
    from_step: int  # the step the run resumed from
    ranks: int  # the number of ranks of the new attempt


@dataclass(frozen=True, slots=True)
class StagePeak:
    """The memory of one stage on one rank."""

    stage: int
    rank: int
    bytes: int  # the peak
    held_bytes: int  # at the end, with no microbatch in flight
    weight_bytes: int  # of one version of the weights
    versions: int  # the largest number of versions at once
    in_flight: int  # the largest number of microbatches at once
    planned_bytes: int  # the peak by the plan


@dataclass(frozen=True, slots=True)
class Copied:
    """Bytes that a step copies between host and device, in one direction."""

    to: str  # device, host
    bytes: int
    planned_bytes: int


@dataclass(frozen=True, slots=True)
class AuditReport:
    """A comparison of one step of a run with a step of the plain loop from the same weights."""

    step: int  # of the minibatch, from 0
    equal: bool
    bitwise: bool
    max_relative_error: float  # of any tensor after the step
    seconds: float  # of CPU time


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of ``train``. ``ranks``, ``schedule`` and ``stages`` are those of the last attempt."""

    losses: tuple[float, ...]  # one per optimizer step
    steps: int
    seconds: float
    samples_per_second: float
    ranks: int
    schedule: str
    stages: int
    run_dir: str
    checkpoint: str
    stopped: bool = False  # a stop was requested, and a checkpoint was written (exit code 75)
    notes: tuple[str, ...] = ()
    restarts: tuple[Restart, ...] = ()
    step: int = 0  # optimizer steps of the run, including earlier invocations
    skipped: tuple[int, ...] = ()  # steps that were skipped because they were not finite
    peaks: tuple[StagePeak, ...] = ()  # if memory was measured
    copied: tuple[Copied, ...] = ()  # to the device, and to the host, if stages take turns on it
    audits: tuple[AuditReport, ...] = ()  # in order of completion
    compared: int = (
        0  # steps of the plan that were compared with plain training before the run, or before an earlier one
    )
    compared_with: str = ""  # which blocks the compared steps had, if the complete model does not fit a comparison
    unproven: bool = False  # audits were requested, and none has proven a step (exit code 1)
    predicted_samples_per_second: float = 0.0  # by the plan of the last attempt
    modules: tuple[str, ...] = ()  # by stage, the names of its modules
    device_flops_per_second: float = 0.0  # model FLOP/s of one rank, on average; 0 if the profile has no operations
    stopped_by: str = ""  # the hook that ended the run early, with a checkpoint; ``stopped`` is then False
    mfu: float | None = None  # relative to the peak of its datasheet; see ``planning.cost.datasheets.utilization``
    slower: str = ""  # why the run was slower than predicted; "" if it was not, by ``report.slower.FACTOR``


@dataclass(frozen=True, slots=True)
class EvaluateResult:
    """The result of ``eval``."""

    loss: float  # the mean over all evaluation data
    samples: int
    batches: int
    seconds: float
    run_dir: str
    step: int  # of the checkpoint


@dataclass(frozen=True, slots=True)
class ExportResult:
    """A file or folder with every parameter and buffer under the model's own names."""

    path: str
    tensors: int
    bytes: int
    step: int  # of the checkpoint
    run_dir: str
    format: str = ""


@dataclass(frozen=True, slots=True)
class PlainResult:
    """A script that ``plain`` wrote."""

    path: str
    steps: int  # that the script trains
    lines: int  # of the file
    notes: tuple[str, ...] = ()  # differences between the script and the run


@dataclass(frozen=True, slots=True)
class ReportResult:
    """A page that ``report`` wrote."""

    path: str
    bytes: int
    run_dir: str  # "" if the page is of the plan
    steps: int  # of the run; 0 for a plan
    # predicted, measured, memory, curves or explanation -> why the page does not have it
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One job of a sweep."""

    number: int  # from 1, in the order of the file
    name: str
    target: str
    settings: dict[str, Any]  # the options that its grid or list gives
    status: str  # waiting, running, paused (until the jobs are compared), done, failed, or dropped by the comparison
    step: int  # optimizer steps done
    steps: int  # of the complete job; 0: not known
    loss: float | None  # of the last step
    metric: float | None  # lower is better
    samples_per_second: float | None  # of its last lease
    seconds: float  # on devices, with the start of each lease
    leases: int  # how often it was started
    devices: str  # on which it runs, or ran last
    seconds_left: float | None  # predicted; None if its length is not known
    run_dir: str
    error: str  # why it failed


@dataclass(frozen=True, slots=True)
class SweepEvent:
    """Something that happened to a job."""

    seconds: float  # since the sweep began
    job: str
    what: str  # started, stopped, paused, done, failed, dropped or retried
    devices: str
    step: int  # optimizer steps done


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The result of ``sweep``."""

    jobs: tuple[SweepRow, ...]  # best first; those without a metric last
    metric: str  # what ``SweepRow.metric`` is
    seconds: float
    directory: str
    results: str  # the path of results.csv
    stopped: bool = False  # a stop was requested, and every job has a checkpoint (exit code 75)
    jobs_per_device: int = 1  # how many shared a device, at most
    events: tuple[SweepEvent, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedLease:
    """A job on its devices for some time, in a predicted timetable."""

    job: str
    devices: tuple[int, ...]
    start: float  # seconds after the start of the sweep
    end: float


@dataclass(frozen=True, slots=True)
class Timetable:
    """The predicted course of a sweep."""

    leases: tuple[PlannedLease, ...]
    seconds: float  # until all jobs are done
    bound: float  # no order of the jobs is faster where none share a device: their sum over the devices, or the longest
    step_seconds: dict[str, float]  # by job
    jobs_per_device: int = 1  # how many may share a device
    notes: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)  # job -> why it could not be prepared

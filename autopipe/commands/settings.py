"""The options of each command, as frozen values. No torch, so that the command line builds them at once.

``None`` (and an empty target) means *not given*: the stored artifact then decides, and without one the default. So an
option contradicts a stored plan only if the user gave it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from autopipe.launch.request import LaunchSettings
from autopipe.options.table import OPTIONS

WORK_DIRECTORY = Path(OPTIONS["work_dir"].default)
MAX_SHAPES: int = OPTIONS["max_shapes"].default
ELASTIC_RESTARTS = 3
AUTO_TEAM = 0
CHECKPOINT_SECONDS = 600.0
EXPORT_FORMATS = OPTIONS["format"].choices
HOOKS = ("example_inputs", "loss", "data", "optimizer", "scheduler", "after_step", "evaluate_data")

Progress = Callable[[str, float], None]
"""Takes (current activity, completed fraction from 0 to 1)."""

Events = Callable[[str, Mapping[str, Any]], None]
"""Takes (kind, fields) of an event of a run.

===========  ========================================================================================
kind         fields
===========  ========================================================================================
progress     ``what``, ``fraction``: as ``Progress``, from the steps before the run
note         ``text``: what was done, or reused
plan         ``plan``: the ``Plan`` of the run
start        ``ranks``, ``steps`` (0 if not known), ``start_step``, ``batch_size``, ``run_dir``; ``unit_mfu``: the MFU
             of one sample per second, None if it is not known
ranks        ``states``: one text for each rank, such as "2F7" or "waits for 1RF3<0"
step         ``step``, ``loss``, ``seconds`` (since the start), ``samples_per_second``
checkpoint   ``step``, ``path``
evaluating   ``step``: an evaluation began, after so many steps
evaluation   ``step``, ``loss``, ``samples``
audit        ``step``, ``equal``, ``bitwise``, ``max_relative_error``: a minibatch compared with plain training
peak         the fields of ``StagePeak``, if memory is measured; at the end
stopping     ``signal``: a clean stop was requested; the run stops after the current minibatch
nonfinite    ``step``, ``what``, ``skipped``: the loss or a gradient is not finite, and the run continues
restart      the fields of ``Restart``, and ``of``: the largest number of restarts
===========  ========================================================================================
"""


def ignore_event(kind: str, fields: Mapping[str, Any]) -> None:
    """Ignore an event: the ``Events`` of a caller that wants none."""


class StopEvent(Protocol):
    """An object that training polls to learn whether to stop, such as a ``threading.Event``."""

    def is_set(self) -> bool:
        """Return whether a stop is requested."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The user's model."""

    target: str = ""  # a TARGET; "" for the model of the stored profile
    _: KW_ONLY
    arguments: dict[str, str] = field(default_factory=dict)  # keyword arguments of the model, as typed
    hooks: dict[str, str] = field(default_factory=dict)  # hook name -> TARGET or short name
    inputs: tuple[str, ...] = ()  # texts of --input
    learning_rate: float | None = None
    seed: int | None = None
    precision: str | None = None
    opaque: str | None = None  # see ``WorkloadSpec``; None for that of the stored profile
    team: int | None = None  # members of each rank; ``AUTO_TEAM``: the planner chooses; None: as the stored profile
    sequence: bool | None = None  # members have their own positions of values; None: as the stored profile

    @property
    def is_given(self) -> bool:
        """Whether the user named a model."""
        return bool(self.target)


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """How a model is captured and measured."""

    model: ModelSettings
    work_dir: Path = WORK_DIRECTORY
    _: KW_ONLY
    device: str | None = None  # auto, cpu or cuda
    microbatch_sizes: tuple[int, ...] | None = None  # the sizes to measure
    threads: int | None = None  # of one rank on a CPU
    allow_data_dependent: bool = False
    verify: bool = True  # compare the captured model with the original
    estimate: bool = False  # count operations and bytes; time nothing and allocate no weights

    @property
    def needs_model_file(self) -> bool:
        """Whether an option requires the model file or a new measurement."""
        return self != ProfileSettings(ModelSettings(), self.work_dir, verify=self.verify)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """A cluster file, or the figures that replace one."""

    file: Path | None = None
    gpu_memory_bytes: int | None = None
    link: float | None = None  # bytes per second
    device_name: str | None = None  # a device with a built-in datasheet, to which the profile is scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSettings:
    """The parameters of a schedule, besides its name."""

    vertical_sync: bool | None = None  # pipedream: all stages use one version of the weights for a minibatch
    stages_per_rank: int | None = None
    warmup_depth: int | None = None  # a multiple of 1f1b's
    file: Path | None = None  # the user's own grid, for the schedule ``custom``


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The requirements of a plan."""

    profile: ProfileSettings
    _: KW_ONLY
    gpus: int | None = None  # ranks; None for the number of the stored plan
    batch_size: int | None = None
    schedule: str | None = None  # a name, or "auto"
    cluster: ClusterSettings = ClusterSettings()
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    recompute: str | None = None
    replicas: str | None = None  # "auto" or "never"; None: auto, unless a buffer would be averaged
    order: OrderSettings = OrderSettings()
    max_shapes: int = MAX_SHAPES  # further shapes of the batch for which code is generated while ranks run
    exact_ties: str | None = None  # "always" or "auto", for tied parameters
    shard_optimizer: str | None = None  # "never" or "auto", for the optimizer state of replicas
    ema: float | None = None  # decay of averaged weights, which take memory; 0 for no averages
    tensor_parallel: int | None = None  # as requested: the members of a rank, or ``AUTO_TEAM``
    sequence_parallel: bool | None = None  # as requested
    elsewhere: bool = False  # the ranks run on hosts whose cores are not known
    resumed: bool = False  # the stored plan is that of the resumed run; only other options change it

    @property
    def work_dir(self) -> Path:
        """The directory of the artifacts."""
        return self.profile.work_dir


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """A comparison with plain training."""

    plan: PlanSettings
    _: KW_ONLY
    steps: int | None = None  # optimizer steps to compare; None: 3, or the staleness of the schedule and 2
    full_batch: bool = False  # also compare every parameter with one step of a full batch
    clip_grad_norm: float = 0.0  # 0: no clipping
    compile: bool = False  # compile the stages
    deferred_batch_norm: bool = False  # update running statistics once for each minibatch


@dataclass(frozen=True, slots=True)
class PlainScriptSettings:
    """A plain training loop to write as a script."""

    plan: PlanSettings
    output: Path
    _: KW_ONLY
    run: Path | None = None  # the run whose loop is written; None for the plan that ``plan`` leads to
    steps: int = 0  # 0: those of the run
    clip_grad_norm: float = 0.0  # 0: no clipping; a run has its own value


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """A training run. At most one of ``steps`` and ``epochs`` is given; without either, it is one epoch."""

    plan: PlanSettings
    _: KW_ONLY
    steps: int | None = None
    epochs: int | None = None
    clip_grad_norm: float | None = None  # 0: no clipping; None: that of the resumed run, else 0
    checkpoint_every: int | None = None  # steps; 0: at the end only; None: about every ``CHECKPOINT_SECONDS``
    evaluate_every: int = 0  # steps; 0: never
    check_first: bool = True  # compare with plain training before the first step of a new plan
    deferred_batch_norm: bool = False  # update running statistics once for each minibatch
    keep_checkpoints: int = 3  # 0: all
    resume: bool = False
    resume_step: int | None = None  # the checkpoint to resume from; None: the newest
    run_dir: Path | None = None  # None: a new one in the work directory
    record_timeline: bool = False
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    max_restarts: int | None = None  # attempts after a rank failed; None: 0, or ``ELASTIC_RESTARTS`` with ``elastic``
    elastic: bool = False  # continue on the remaining ranks
    devices: tuple[int, ...] = ()  # GPUs that the ranks may use; (): all
    excluded_devices: tuple[int, ...] = ()  # GPUs that no rank uses
    on_nonfinite: str = "stop"  # for a loss or gradient that is not finite: stop, warn, or skip the step on all ranks
    init_from: Path | None = None  # initial weights; ignored by a resumed run
    trust: bool = False  # accept a format of ``init_from`` that can run code
    measure_memory: bool = False
    data_reader: str = "beside"  # one of ``runtime.job.DATA_READERS``
    same_data: bool = True  # see ``runtime.job.Job``
    replay: str = "some"  # see ``runtime.job.Job``
    new_rate: float | None = None  # a learning rate that replaces the one of the checkpoint
    audit_every: int | None = None  # steps; 0: never; None: as often as costs little, and the second step
    audit_offset: int = 0  # as in ``runtime.job.Job``; ``train`` chooses it
    first_minibatch: str = ""  # as in ``runtime.job.Job``; ``train`` reads it
    compile: bool | None = None  # compile the stages; None: as in the resumed run, else not
    on_step: str | Callable[..., Any] | None = None  # a TARGET or a function; None: that of the model file
    on_evaluate: str | Callable[..., Any] | None = None  # the same
    loop: str = ""  # the socket of ``commands.loop`` that gives the minibatches; "": the data of the model
    log: tuple[str, ...] = ()  # other tools that record the metrics, of ``LOGGERS``

    @property
    def restarts(self) -> int:
        """The largest number of restarts."""
        if self.max_restarts is None:
            return ELASTIC_RESTARTS if self.elastic else 0
        return self.max_restarts


@dataclass(frozen=True, slots=True)
class EvaluateSettings:
    """An evaluation of a run."""

    run: Path | None = None  # None: the newest of the work directory
    _: KW_ONLY
    work_dir: Path = WORK_DIRECTORY
    batch_size: int | None = None
    data: str | None = None  # a TARGET that replaces the ``evaluate_data`` hook
    model: ModelSettings = ModelSettings()  # the model named again, with its arguments and loss; else that of the run
    averaged: bool = False  # use the averaged weights


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """An export of a run's weights."""

    output: Path
    _: KW_ONLY
    run: Path | None = None  # None: the newest of the work directory
    work_dir: Path = WORK_DIRECTORY
    step: int | None = None  # of the checkpoint; None: the newest
    format: str | None = None  # one of ``EXPORT_FORMATS``; None: by the suffix of ``output``
    model: ModelSettings = ModelSettings()  # the model named again, with its arguments; else that of the run
    averaged: bool = False  # write the averaged weights instead of the last ones


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """A page about a plan or a run."""

    output: Path
    _: KW_ONLY
    run: str | None = None  # a run directory, its name, or ``plan``; None: the newest run, else the plan
    work_dir: Path = WORK_DIRECTORY

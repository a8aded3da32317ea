"""What each command is asked for, as frozen values. No torch, so that the command line can build them at once.

``None`` (and an empty target) means *not said*: then the stored artifact decides, and where there is none, the default.
So an option contradicts a stored plan only where the user gave it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopipe.launch.request import LaunchSettings

WORK_DIRECTORY = Path(".autopipe")
MAX_SHAPES = 16
ELASTIC_RESTARTS = 3
CHECKPOINT_SECONDS = 600.0
EXPORT_FORMATS = ("safetensors", "pt", "hf", "dcp")
DATA_READERS = ("auto", "each", "one")
HOOKS = ("example_inputs", "loss", "data", "optimizer", "scheduler", "after_step", "evaluate_data")

Progress = Callable[[str, float], None]
"""(what is done, the part of it that is done: 0 to 1)."""

Events = Callable[[str, Mapping[str, Any]], None]
"""(kind, fields) of something that happened in a run.

===========  ========================================================================================
kind         fields
===========  ========================================================================================
progress     ``what``, ``fraction``: as ``Progress``, from the steps before the run
note         ``text``: what was done, or reused
plan         ``plan``: the ``Plan`` that is run
start        ``ranks``, ``steps`` (0 where not known), ``start_step``, ``batch_size``, ``run_dir``
ranks        ``states``: one text a rank, such as "2F7" or "waits for 1RF3<0"
step         ``step``, ``loss``, ``seconds`` (since the start), ``samples_per_second``
checkpoint   ``step``, ``path``
evaluation   ``loss``, ``samples``
audit        ``step``, ``equal``, ``bitwise``, ``max_relative_error``: a minibatch compared with plain training
peak         the fields of ``StagePeak``, where memory is measured; at the end
stopping     ``signal``: the run was asked to stop, and does after the minibatch that is under way
nonfinite    ``step``, ``what``, ``skipped``: the loss or a gradient is not finite, and the run goes on
restart      the fields of ``Restart``, and ``of``: how many there may be
===========  ========================================================================================
"""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The user's model. ``target`` "": the one of the stored profile. ``hooks``: hook name -> TARGET or short name.

    ``arguments``: keyword arguments of the model, as typed. ``inputs``: ``--input`` texts. ``opaque``: see
    ``WorkloadSpec``; None for what the stored profile has.
    """

    target: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    hooks: dict[str, str] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    learning_rate: float | None = None
    seed: int | None = None
    precision: str | None = None
    opaque: str | None = None

    @property
    def said(self) -> bool:
        """Whether the user named a model at all."""
        return bool(self.target)


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """``device``: auto, cpu or cuda. ``microbatch_sizes``: what is measured. ``threads``: of one rank on a CPU.

    ``estimate``: nothing is timed, and no weight is made.
    """

    model: ModelSettings
    work_dir: Path = WORK_DIRECTORY
    device: str | None = None
    microbatch_sizes: tuple[int, ...] | None = None
    threads: int | None = None
    allow_data_dependent: bool = False
    verify: bool = True
    estimate: bool = False

    @property
    def asks_for_model(self) -> bool:
        """Whether anything was said that the model file is needed for, or a new measurement."""
        return self != ProfileSettings(ModelSettings(), self.work_dir, verify=self.verify)


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """A cluster file, or the figures that stand for one. ``gpu_memory_bytes``, ``link`` (bytes per second).

    ``device_name``: a device with a built-in datasheet, to which the profile is scaled.
    """

    file: Path | None = None
    gpu_memory_bytes: int | None = None
    link: float | None = None
    device_name: str | None = None


@dataclass(frozen=True, slots=True)
class OrderSettings:
    """What a schedule is told beyond its name. ``file``: the user's own grid, for the schedule ``custom``.

    ``warmup_depth``: a multiple of 1f1b's. ``vertical_sync``: all stages of pipedream read one version.
    """

    vertical_sync: bool | None = None
    stages_per_rank: int | None = None
    warmup_depth: int | None = None
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What a plan is for. ``schedule``: a name or "auto"; ``gpus``: ranks, where None is those of the stored plan.

    ``replicas``: "auto" (stages may run on several ranks) or "never"; None: auto, where no buffer
    would be averaged. ``max_shapes``: for how many further shapes of
    the batch code is made while ranks run. ``exact_ties``: "always" or "auto", of tied parameters. ``ema``: decay of
    averaged weights, which take memory; 0: none.
    """

    profile: ProfileSettings
    gpus: int | None = None
    batch_size: int | None = None
    schedule: str | None = None
    cluster: ClusterSettings = ClusterSettings()
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    recompute: str | None = None
    replicas: str | None = None
    order: OrderSettings = OrderSettings()
    max_shapes: int = MAX_SHAPES
    exact_ties: str | None = None
    ema: float | None = None

    @property
    def work_dir(self) -> Path:
        """Where the artifacts are."""
        return self.profile.work_dir


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """``steps``: optimizer steps that are compared with plain training. ``full_batch``: every parameter of one step of
    a whole batch as well. ``clip_grad_norm`` 0: none.
    """

    plan: PlanSettings
    steps: int = 2
    full_batch: bool = False
    clip_grad_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class PlainScriptSettings:
    """``run``: the run whose loop is written; None for the plan that ``plan`` leads to. ``steps`` 0: those of the run.

    ``clip_grad_norm`` 0: none. A run has its own.
    """

    plan: PlanSettings
    output: Path
    run: Path | None = None
    steps: int = 0
    clip_grad_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """One run. At most one of ``steps`` and ``epochs``; with neither, one epoch.

    ``clip_grad_norm`` 0: none; None: not given; then 0, or that of the run that goes on. ``checkpoint_every`` 0:
    at the end only; None: about every ``CHECKPOINT_SECONDS``, by the plan's prediction.
    ``evaluate_every`` 0: never while training. ``audit_every``: steps, 0 for never, None for as often as costs little.
    ``check_first``: compare with plain training before the first step of a new plan. ``deferred_batch_norm``: running
    statistics once a minibatch. ``resume``: go on from ``resume_step``, None being the newest checkpoint. ``run_dir``
    None: a new one in the work directory. ``max_restarts``: new attempts after a rank failed; None is none, and with
    ``elastic`` (go on with the ranks that are left) ``ELASTIC_RESTARTS``. ``excluded_devices``: GPUs that no rank
    uses. ``on_nonfinite``: what a loss or gradient that is not finite leads to: the end (``stop``), a message
    (``warn``), or a step that all ranks leave out (``skip``). ``init_from``: weights to start from, which are left
    alone where a run is resumed; ``trust``: they may be in a format that can run code. ``data_reader``: one of
    ``DATA_READERS``; "auto" lets every rank read where the data repeats, else rank 0 for all. ``same_data``,
    ``replay``: as in ``runtime.job.Job``. ``new_rate``: the learning rate that takes the place of
    the checkpoint's.
    """

    plan: PlanSettings
    steps: int | None = None
    epochs: int | None = None
    clip_grad_norm: float | None = None
    checkpoint_every: int | None = None
    evaluate_every: int = 0
    check_first: bool = True
    deferred_batch_norm: bool = False
    keep_checkpoints: int = 3
    resume: bool = False
    resume_step: int | None = None
    run_dir: Path | None = None
    record_timeline: bool = False
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    max_restarts: int | None = None
    elastic: bool = False
    excluded_devices: tuple[int, ...] = ()
    on_nonfinite: str = "stop"
    init_from: Path | None = None
    trust: bool = False
    measure_memory: bool = False
    data_reader: str = "auto"
    same_data: bool = True
    replay: str = "some"
    new_rate: float | None = None
    audit_every: int | None = None

    @property
    def restarts(self) -> int:
        """How many new attempts there may be."""
        if self.max_restarts is None:
            return ELASTIC_RESTARTS if self.elastic else 0
        return self.max_restarts


@dataclass(frozen=True, slots=True)
class EvaluateSettings:
    """``run`` None: the newest one of the work directory. ``data``: a TARGET in place of the ``evaluate_data`` hook.

    ``model``: the model, named again with its arguments and loss; an empty target is the one of the run. ``averaged``:
    the averaged weights.
    """

    run: Path | None = None
    work_dir: Path = WORK_DIRECTORY
    batch_size: int | None = None
    data: str | None = None
    model: ModelSettings = ModelSettings()
    averaged: bool = False


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """``format``: one of ``EXPORT_FORMATS``; None: by the name of ``output``. ``step`` None: the newest checkpoint.

    ``model``: the model, named again with its arguments; an empty target is the one of the run. ``averaged``: the
    averaged weights in place of the last.
    """

    output: Path
    run: Path | None = None
    work_dir: Path = WORK_DIRECTORY
    step: int | None = None
    format: str | None = None
    model: ModelSettings = ModelSettings()
    averaged: bool = False

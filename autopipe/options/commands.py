"""The options of each command, with their types: keywords of ``autopipe.Pipeline``, and options of the command line.

``--batch-size 64`` is ``batch_size=64``. An option that is missing or None is not given. ``table.OPTIONS`` has the rest
of an option; where a command has another one under the same name, its annotation has it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict, get_args

from autopipe.options.table import OPTIONS, Option

StrPath = str | Path
Target = str | Path | Callable[..., Any]
"""A TARGET text, or a function or class that a module defines under its own name."""


class ModelOptions(TypedDict, total=False):
    """Options of the user's model."""

    arg: Mapping[str, Any] | None
    input: str | Sequence[str] | None
    loss: Target | None
    data: Target | None
    eval_data: Target | None
    optimizer: Target | None
    after_step: Target | None
    lr: float | None
    precision: str | None
    seed: int | None


class ProfileOptions(ModelOptions, total=False):
    """Options of the model and its measurement."""

    batch_size: int | None
    device: str | None
    microbatch_sizes: Sequence[int] | None
    threads_per_rank: int | None
    allow_data_dependent: bool | None
    opaque: str | None
    tensor_parallel: str | int | None
    sequence_parallel: bool | None
    no_verify: bool | None
    work_dir: StrPath | None


class ProfileCommand(ProfileOptions, total=False):
    """Options of ``autopipe profile``."""

    links: bool
    estimate: bool


class OrderOptions(TypedDict, total=False):
    """Options of schedules."""

    vertical_sync: bool | None
    stages_per_rank: int | None
    warmup_depth: int | None
    schedule_file: StrPath | None


class PlanOptions(ProfileOptions, OrderOptions, total=False):
    """Options of model, measurement and plan."""

    gpus: int | None
    schedule: str | None
    cluster: StrPath | None
    gpu_memory: str | int | None
    link: str | float | None
    device_name: str | None
    replicas: str | None
    ema: float | None
    num_microbatches: int | None
    microbatch_size: int | None
    recompute: str | None
    exact_ties: str | None
    shard_optimizer: str | None


class PlanCommand(PlanOptions, total=False):
    """Options of ``autopipe plan``."""

    sweep_gpus: Sequence[int] | None
    explain: bool


class SimulateOptions(OrderOptions, total=False):
    """Options of ``simulate``."""

    schedule: Annotated[
        str | None, Option("Simulate this schedule instead of the plan's.", kind="schedule", metavar="NAME")
    ]
    trace: StrPath | None
    work_dir: StrPath | None


class PipelineOptions(PlanOptions, total=False):
    """Options of the commands whose ranks read the data."""

    max_shapes: int | None


class CheckOptions(PipelineOptions, total=False):
    """Options of ``check``."""

    steps: Annotated[
        int | None,
        Option(
            "Optimizer steps to compare. [default: 3, or the staleness of the schedule and 2]", common=True, metavar="K"
        ),
    ]
    full_batch: bool | None
    clip_grad_norm: float | None
    compile: bool | None
    deferred_batch_norm: bool | None


class PlainOptions(PipelineOptions, total=False):
    """Options of ``plain``."""

    steps: Annotated[
        int | None, Option("Number of steps. [default: those of the run, or 10]", common=True, metavar="K")
    ]
    clip_grad_norm: float | None


class PlainCommand(PlainOptions, total=False):
    """Options of ``autopipe plain``."""

    output: StrPath


class HostOptions(TypedDict, total=False):
    """Options of hosts."""

    hosts: str | Sequence[Any] | None  # texts, or ``launch.request.Host``
    hostfile: StrPath | None
    ssh_config: StrPath | None
    remote_python: str | None
    interface: str | None
    trust_network: bool | None


class LaunchOptions(HostOptions, total=False):
    """Options of launchers and hosts."""

    launcher: str | None
    watchdog: float | None


class TrainOptions(PipelineOptions, LaunchOptions, total=False):
    """Options of ``train``."""

    steps: int | None
    epochs: int | None
    clip_grad_norm: float | None
    checkpoint_every: int | None
    eval_every: int | None
    audit_every: int | str | None
    check: bool | None
    compile: bool | None
    deferred_batch_norm: bool | None
    keep_checkpoints: int | None
    resume: bool | int | None
    max_restarts: int | None
    elastic: bool | None
    on_nonfinite: str | None
    init_from: StrPath | None
    trust: bool | None
    data_reader: str | None
    allow_other_data: bool | None
    run_dir: StrPath | None
    timeline: bool | None
    measure_memory: bool | None
    on_step: Target | None
    on_evaluate: Target | None
    log: str | Sequence[str] | None


class TrainCommand(TrainOptions, total=False):
    """Options of ``autopipe train``."""

    slurm_option: Sequence[Any]
    dry_run: bool
    events: StrPath | None


class AgainOptions(TypedDict, total=False):
    """The model of a run, named again."""

    target: Target | None
    arg: Annotated[Mapping[str, Any] | None, Option("Argument of --target, name=value. Repeatable.", kind="arguments")]
    work_dir: StrPath | None


class EvaluateOptions(AgainOptions, total=False):
    """Options of ``eval``."""

    batch_size: Annotated[int | None, Option("Samples per batch.", metavar="B")]
    eval_data: Target | None
    averaged: Annotated[bool | None, Option("Evaluate the averaged weights of `train --ema`.", flags=("--ema",))]
    loss: Annotated[Target | None, Option("Loss of --target that replaces the file's `loss`.")]


class ExportOptions(AgainOptions, total=False):
    """Options of ``export``."""

    format: str | None
    step: int | None
    averaged: bool | None


class ExportCommand(ExportOptions, total=False):
    """Options of ``autopipe export``."""

    output: Annotated[
        StrPath,
        Option(
            "The file; .safetensors or .pt selects the format. A name without a suffix is a folder in torch's DCP "
            "format.",
            flags=("-o", "--output"),
            required=True,
        ),
    ]


class WorkOptions(TypedDict, total=False):
    """Options of the commands that only need the work directory."""

    work_dir: StrPath | None


class ReportCommand(WorkOptions, total=False):
    """Options of ``autopipe report``."""

    output: Annotated[StrPath, Option("The file to write.", default="report.html", flags=("-o", "--output"))]


class ShowCommand(WorkOptions, total=False):
    """Options of ``autopipe show``."""

    verify: bool


class DoctorCommand(HostOptions, total=False):
    """Options of ``autopipe doctor``."""

    links: Annotated[bool, Option("Measure between two ranks -> links.json, which plan then uses.")]
    work_dir: StrPath | None


class SweepCommand(TypedDict, total=False):
    """Options of ``autopipe sweep``."""

    devices: str | None
    jobs_per_device: str | None
    resume: Annotated[bool, Option("Continue the sweep; failed jobs are tried again.")]
    dry_run: Annotated[bool, Option("Measure the models and print the predicted timetable.")]
    sweep_dir: StrPath | None


class ScriptCommand(HostOptions, total=False):
    """Options of ``autopipe run``."""

    gpus: Annotated[
        int | None, Option("Ranks, one process each. [default: as many as the launcher starts, else 2]", common=True)
    ]
    check: Annotated[
        int,
        Option(
            "Optimizer steps that are compared with the script in a process of its own; 0: none.",
            common=True,
            metavar="K",
            default=2,
            least=0,
        ),
    ]
    num_microbatches: Annotated[
        str,
        Option(
            "Parts of the batch of each training call, for overlap. Above 1, not bit-equal to python. auto: where a "
            "trial shows that only the order of sums changes.",
            common=True,
            metavar="auto|M",
            default="1",
        ),
    ]
    replicas: Annotated[
        str,
        Option(
            "Copies of the model, each with its share of the ranks, for the parts of a batch or the script's own "
            "microbatches. auto: the fastest with --num-microbatches, else one.",
            common=True,
            metavar="auto|never|R",
            default="auto",
        ),
    ]
    timeout: float
    stages_dir: StrPath | None
    launcher: Annotated[
        str | None,
        Option(
            "How the ranks are started; slurm: in the allocation of this process. [default: local]",
            common=True,
            choices=("local", "ssh", "slurm", "env"),
        ),
    ]


# type of the value -> kind, for options that do not name theirs
_KINDS: dict[Any, str] = {bool: "switch", int: "count", float: "number", str: "text", StrPath: "path", Target: "target"}
_KINDS |= {kind | None: name for kind, name in _KINDS.items()}


@functools.cache
def options_of(command: type) -> Mapping[str, Option]:
    """Return the options of a command by name, inherited ones first. ``command``: a typed dictionary of this module."""
    options = {}
    for name, annotation in command.__annotations__.items():
        kind, *own = get_args(annotation) if hasattr(annotation, "__metadata__") else (annotation,)
        option: Option = own[0] if own else OPTIONS[name]
        derived = "choice" if option.choices else _KINDS.get(kind, "")
        options[name] = dataclasses.replace(option, kind=option.kind or derived, group=OPTIONS[name].group)
    return options


def given(command: type, values: Mapping[str, Any]) -> Any:
    """Return the values that are given for the options of a command."""
    return {name: values[name] for name in options_of(command) if values.get(name) is not None}


def exclusive_pair(options: Mapping[str, Option], values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first two options, by name, that are both given and exclude each other, or None."""
    pairs = ((name, other) for name, option in options.items() for other in option.excludes)
    return next((pair for pair in pairs if all(values.get(name) not in (None, ()) for name in pair)), None)


def excluded_by(command: type, name: str) -> tuple[str, ...]:
    """Return the options of a command that cannot be given together with this one."""
    options = options_of(command)
    return (*options[name].excludes, *(other for other, option in options.items() if name in option.excludes))

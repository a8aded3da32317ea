"""The options of the commands, by name: one table for the command line and for ``autopipe.Pipeline``.

An option has the same name in both: ``--batch-size 64`` is ``batch_size=64``. The typed dictionaries below declare the
names and types; the functions ``*_settings`` turn options into the settings of a command. An option that is missing or
None is not given. A test compares the table with the options of the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from autopipe.commands.settings import (
    AUTO_TEAM,
    EXPORT_FORMATS,
    CheckSettings,
    ClusterSettings,
    EvaluateSettings,
    ExportSettings,
    ModelSettings,
    OrderSettings,
    PlainScriptSettings,
    PlanSettings,
    ProfileSettings,
    TrainSettings,
)
from autopipe.launch.registry import LAUNCHERS
from autopipe.launch.request import LaunchSettings
from autopipe.runtime.job import DATA_READERS

if TYPE_CHECKING:
    from autopipe.launch.request import Host

NEWEST = -1  # of ``resume``: the newest checkpoint

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

    device: str | None
    microbatch_sizes: Sequence[int] | None
    threads_per_rank: int | None
    allow_data_dependent: bool | None
    opaque: str | None
    tensor_parallel: str | int | None
    sequence_parallel: bool | None
    no_verify: bool | None
    work_dir: StrPath | None


class OrderOptions(TypedDict, total=False):
    """Options of schedules."""

    vertical_sync: bool | None
    stages_per_rank: int | None
    warmup_depth: int | None
    schedule_file: StrPath | None


class PlanOptions(ProfileOptions, OrderOptions, total=False):
    """Options of model, measurement and plan."""

    gpus: int | None
    batch_size: int | None
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


class PipelineOptions(PlanOptions, total=False):
    """Options of the commands whose ranks read the data."""

    max_shapes: int | None


class CheckOptions(PipelineOptions, total=False):
    """Options of ``check``."""

    steps: int | None
    full_batch: bool | None
    clip_grad_norm: float | None
    compile: bool | None
    deferred_batch_norm: bool | None


class PlainOptions(PipelineOptions, total=False):
    """Options of ``plain``."""

    steps: int | None
    clip_grad_norm: float | None


class HostOptions(TypedDict, total=False):
    """Options of hosts."""

    hosts: str | Sequence[Host | str] | None
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


class EvaluateOptions(TypedDict, total=False):
    """Options of ``eval``."""

    batch_size: int | None
    eval_data: Target | None
    averaged: bool | None
    target: Target | None
    arg: Mapping[str, Any] | None
    loss: Target | None
    work_dir: StrPath | None


class ExportOptions(TypedDict, total=False):
    """Options of ``export``."""

    format: str | None
    step: int | None
    averaged: bool | None
    target: Target | None
    arg: Mapping[str, Any] | None
    work_dir: StrPath | None


class ReportOptions(TypedDict, total=False):
    """Options of ``report``."""

    work_dir: StrPath | None


class SimulateOptions(OrderOptions, total=False):
    """Options of ``simulate``."""

    schedule: str | None
    trace: StrPath | None
    work_dir: StrPath | None


# option -> its values, for options with a fixed list of them
CHOICES: dict[str, tuple[str, ...]] = {
    "precision": ("fp32", "bf16", "fp16"),
    "device": ("auto", "cpu", "cuda"),
    "replicas": ("auto", "never"),
    "recompute": ("auto", "never", "block", "stage", "always"),
    "exact_ties": ("auto", "always"),
    "shard_optimizer": ("auto", "never"),
    "on_nonfinite": ("stop", "warn", "skip"),
    "data_reader": DATA_READERS,
    "format": EXPORT_FORMATS,
    "launcher": tuple(LAUNCHERS),
}
# option -> its smallest value, for options that are whole numbers
LEAST: dict[str, int] = {
    **dict.fromkeys(("gpus", "batch_size", "num_microbatches", "microbatch_size", "threads_per_rank"), 1),
    **dict.fromkeys(("steps", "epochs", "stages_per_rank", "warmup_depth"), 1),
    **dict.fromkeys(("max_shapes", "checkpoint_every", "eval_every", "keep_checkpoints", "max_restarts", "step"), 0),
}
# options that are switches: True or False
SWITCHES = frozenset(
    (
        *("allow_data_dependent", "no_verify", "vertical_sync", "full_batch", "trust_network", "check", "averaged"),
        *("deferred_batch_norm", "elastic", "trust", "allow_other_data", "timeline", "measure_memory"),
        *("compile", "sequence_parallel"),
    )
)
# options that are numbers, whole or not
NUMBERS = frozenset(("lr", "ema", "clip_grad_norm", "watchdog"))
_EXCLUSIVE = (
    ("num_microbatches", "microbatch_size"),
    ("cluster", "gpu_memory"),
    ("cluster", "link"),
    ("cluster", "device_name"),
    ("hosts", "hostfile"),
    ("steps", "epochs"),
)


def exclusive_pair(options: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first two options that are both given and exclude each other, or None."""
    return next((pair for pair in _EXCLUSIVE if all(options.get(name) not in (None, ()) for name in pair)), None)


def excluded_by(name: str) -> tuple[str, ...]:
    """Return the options that cannot be given together with this one."""
    return tuple(other for pair in _EXCLUSIVE if name in pair for other in pair if other != name)


def _given(options: Mapping[str, Any], **fields: str) -> dict[str, Any]:
    """Return field -> value of the options that are given; ``fields``: field -> option."""
    return {field: options[option] for field, option in fields.items() if options.get(option) is not None}


def model_settings(target: str | None, options: Mapping[str, Any]) -> ModelSettings:
    """Return the settings of ``ModelOptions``, and of how the model is captured."""
    hooks = {
        "loss": options.get("loss"),
        "data": options.get("data"),
        "optimizer": options.get("optimizer"),
        "evaluate_data": options.get("eval_data"),
        "after_step": options.get("after_step"),
    }
    return ModelSettings(
        target or "",
        arguments=dict(options.get("arg") or {}),
        hooks={name: text for name, text in hooks.items() if text},
        inputs=tuple(options.get("input") or ()),
        team=_team(options),
        sequence=options.get("sequence_parallel"),
        **_given(options, learning_rate="lr", seed="seed", precision="precision", opaque="opaque"),
    )


def _team(options: Mapping[str, Any]) -> int | None:
    team = options.get("tensor_parallel")
    return AUTO_TEAM if team == "auto" else team


def profile_settings(target: str | None, options: Mapping[str, Any], *, estimate: bool = False) -> ProfileSettings:
    """Return the settings of ``ProfileOptions``."""
    return ProfileSettings(
        model_settings(target, options),
        verify=not options.get("no_verify"),
        estimate=estimate,
        **_given(
            options,
            work_dir="work_dir",
            device="device",
            microbatch_sizes="microbatch_sizes",
            threads="threads_per_rank",
            allow_data_dependent="allow_data_dependent",
        ),
    )


def order_settings(options: Mapping[str, Any]) -> OrderSettings:
    """Return the settings of ``OrderOptions``."""
    fields = _given(
        options, vertical_sync="vertical_sync", stages_per_rank="stages_per_rank", warmup_depth="warmup_depth"
    )
    return OrderSettings(**fields, **_given(options, file="schedule_file"))


def plan_settings(target: str | None, options: Mapping[str, Any]) -> PlanSettings:
    """Return the settings of ``PipelineOptions``."""
    names = (
        *("gpus", "batch_size", "schedule", "num_microbatches", "microbatch_size", "recompute", "replicas"),
        *("max_shapes", "exact_ties", "shard_optimizer", "ema"),
    )
    return PlanSettings(
        profile_settings(target, options),
        cluster=ClusterSettings(
            **_given(options, file="cluster", gpu_memory_bytes="gpu_memory", link="link", device_name="device_name")
        ),
        order=order_settings(options),
        tensor_parallel=_team(options),
        sequence_parallel=options.get("sequence_parallel"),
        **_given(options, **{name: name for name in names}),
    )


def check_settings(target: str | None, options: Mapping[str, Any]) -> CheckSettings:
    """Return the settings of ``CheckOptions``."""
    names = ("steps", "full_batch", "clip_grad_norm", "compile", "deferred_batch_norm")
    fields = _given(options, **{name: name for name in names})
    return CheckSettings(plan_settings(target, options), **fields)


def plain_settings(
    target: str | None, output: Path, run: Path | None, options: Mapping[str, Any]
) -> PlainScriptSettings:
    """Return the settings of ``PlainOptions``."""
    fields = _given(options, steps="steps", clip_grad_norm="clip_grad_norm")
    return PlainScriptSettings(plan_settings(target, options), output, run=run, **fields)


def launch_settings(options: Mapping[str, Any], *, dry_run: bool = False) -> LaunchSettings:
    """Return the settings of ``LaunchOptions``."""
    fields = _given(
        options,
        launcher="launcher",
        remote_python="remote_python",
        ssh_config="ssh_config",
        interface="interface",
        trust_network="trust_network",
        watchdog_seconds="watchdog",
    )
    return LaunchSettings(hosts=options.get("hosts") or options.get("hostfile") or (), dry_run=dry_run, **fields)


def train_settings(
    target: str | None, options: Mapping[str, Any], *, launch: LaunchSettings, devices: Sequence[int] = ()
) -> TrainSettings:
    """Return the settings of ``TrainOptions``; ``launch`` is made from ``LaunchOptions`` by ``launch_settings``."""
    names = (
        *("steps", "epochs", "clip_grad_norm", "checkpoint_every", "audit_every", "deferred_batch_norm", "trust"),
        *("keep_checkpoints", "max_restarts", "elastic", "on_nonfinite", "init_from", "data_reader", "run_dir"),
        *("measure_memory", "compile", "on_step", "on_evaluate", "log"),
    )
    resume = options.get("resume")
    resumes = resume is not None and resume is not False
    return TrainSettings(
        plan_settings(target, options),
        resume=resumes,
        resume_step=resume if resumes and resume is not True and resume != NEWEST else None,
        launch=launch,
        devices=tuple(devices),
        same_data=not options.get("allow_other_data"),
        **_given(options, evaluate_every="eval_every", check_first="check", record_timeline="timeline"),
        **_given(options, **{name: name for name in names}),
    )


def evaluate_settings(run: Path | None, options: Mapping[str, Any]) -> EvaluateSettings:
    """Return the settings of ``EvaluateOptions``."""
    fields = _given(options, work_dir="work_dir", batch_size="batch_size", data="eval_data", averaged="averaged")
    return EvaluateSettings(run, model=_named_again(options), **fields)


def export_settings(output: Path, run: Path | None, options: Mapping[str, Any]) -> ExportSettings:
    """Return the settings of ``ExportOptions``."""
    fields = _given(options, work_dir="work_dir", step="step", format="format", averaged="averaged")
    return ExportSettings(output, run=run, model=_named_again(options), **fields)


def _named_again(options: Mapping[str, Any]) -> ModelSettings:
    return model_settings(options.get("target"), {name: options.get(name) for name in ("arg", "loss")})
